"""Adapt mlx-lm's ChunkedKVCache: rows from ``start`` on, the last chunk or more."""

from __future__ import annotations

from typing import Any

from vkv.caches.kinds.adapter import Adapter, Loaded, keys_and_values, numbers, trim, with_rows
from vkv.format.kinds import KINDS


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = with_rows(cls(scalars["chunk_size"]), loaded)
    cache.offset, cache.start_position = scalars["offset"], scalars["start"]
    return cache


ADAPTER = Adapter(
    kind=KINDS["chunked"],
    scalars=lambda cache: numbers(
        cache, offset="offset", chunk_size="chunk_size", start="start_position"
    ),
    values=lambda cache, scalars: keys_and_values(cache, scalars["offset"] - scalars["start"]),
    make=_make,
    cut=trim,
    saved_numbers=(("chunk_size", "start"),),
    saved_state=("keys", "values", "offset", "chunk_size", "start"),
)
