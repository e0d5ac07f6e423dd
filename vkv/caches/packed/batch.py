"""Join caches to one for mlx-lm's batch generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkv.caches.kinds.adapter import Packed


def dense(cache: Any) -> Any:
    """Return mlx-lm's KVCache with the tokens of a packed cache, decoded."""
    from mlx_lm.models.cache import KVCache

    plain = KVCache()
    if not cache.empty():
        plain.keys, plain.values = cache.keys_and_values()
        plain.offset = cache.offset
    return plain


def merge(caches: Sequence[Any]) -> Any:
    """Return one BatchKVCache of several sequences.

    Args:
        caches: Packed caches, and KVCaches of mlx-lm, filled or fresh.
    """
    from mlx_lm.models.cache import BatchKVCache

    return BatchKVCache.merge([dense(c) if isinstance(c, Packed) else c for c in caches])
