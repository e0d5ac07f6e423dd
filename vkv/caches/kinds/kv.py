"""Adapt mlx-lm's KVCache: a buffer that grows in steps."""

from __future__ import annotations

from typing import Any

from vkv.caches.kinds.adapter import Adapter, Loaded, keys_and_values, numbers, trim, with_rows
from vkv.format.kinds import KINDS


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = with_rows(cls(), loaded)
    cache.offset = scalars["offset"]
    return cache


ADAPTER = Adapter(
    kind=KINDS["kv"],
    scalars=lambda cache: numbers(cache, offset="offset"),
    values=lambda cache, scalars: keys_and_values(cache, scalars["offset"]),
    make=_make,
    cut=trim,
    saved_state=("keys", "values", "offset"),
)
