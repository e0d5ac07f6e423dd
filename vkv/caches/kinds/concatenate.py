"""Adapt mlx-lm's ConcatenateKVCache: exactly the rows that were fed."""

from __future__ import annotations

from typing import Any

from vkv.caches.kinds.adapter import Adapter, Loaded, keys_and_values, numbers, with_rows
from vkv.format.kinds import KINDS


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = with_rows(cls(), loaded)
    cache.offset = scalars["offset"]
    return cache


def _cut(cache: Any, tokens: int) -> None:
    """Drop the rows too: the class appends behind all it holds, whatever its offset."""
    cache.trim(max(cache.offset - tokens, 0))
    if cache.keys is not None:
        cache.keys, cache.values = (x[..., : cache.offset, :] for x in (cache.keys, cache.values))


ADAPTER = Adapter(
    kind=KINDS["concatenate"],
    scalars=lambda cache: numbers(cache, offset="offset"),
    values=lambda cache, scalars: keys_and_values(cache, scalars["offset"]),
    make=_make,
    cut=_cut,
    saved_state=("keys", "values"),
)
