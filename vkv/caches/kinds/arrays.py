"""Adapt mlx-lm's ArraysCache: slots of recurrent state, which knows no tokens."""

from __future__ import annotations

from typing import Any

from vkv.caches.kinds.adapter import Adapter, Loaded, Value, array
from vkv.errors import CacheError
from vkv.format.kinds import KINDS


def _values(cache: Any, scalars: dict[str, int]) -> dict[str, Value]:
    slots = {str(i): x for i, x in enumerate(cache.cache)}
    slots |= {name: getattr(cache, name, None) for name in ("left_padding", "lengths")}
    arrays = {name: array(x, name) for name, x in slots.items() if x is not None}
    return {name: Value(x.shape, x.dtype, x, tokens=False) for name, x in arrays.items()}


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = cls(scalars["size"])
    cache.cache = [loaded.get(str(i)) for i in range(scalars["size"])]
    cache.left_padding, cache.lengths = loaded.get("left_padding"), loaded.get("lengths")
    return cache


def _cut(cache: Any, tokens: int) -> None:
    raise CacheError("recurrent state cannot be cut", rule="L8")


ADAPTER = Adapter(
    kind=KINDS["arrays"],
    scalars=lambda cache: {"size": len(cache.cache)},
    values=_values,
    make=_make,
    cut=_cut,
    saved_state=("slots", "left_padding", "lengths"),
)
