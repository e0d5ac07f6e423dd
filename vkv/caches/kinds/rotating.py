"""Adapt mlx-lm's RotatingKVCache: the first ``keep`` tokens and a ring of the newest."""

from __future__ import annotations

from typing import Any

from vkv.caches.kinds.adapter import Adapter, Loaded, keys_and_values, numbers, trim, with_rows
from vkv.format.kinds import KINDS


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = with_rows(cls(scalars["max_size"], keep=scalars["keep"]), loaded)
    cache.offset, cache._idx = scalars["offset"], scalars["idx"]
    return cache


ADAPTER = Adapter(
    kind=KINDS["rotating"],
    scalars=lambda cache: numbers(
        cache, offset="offset", keep="keep", max_size="max_size", idx="_idx"
    ),
    values=lambda cache, scalars: keys_and_values(cache, scalars["offset"]),
    make=_make,
    cut=trim,
    saved_numbers=(
        ("keep", "max_size", "offset", "idx"),
        ("keep", "max_size", "step", "offset", "idx"),  # before 0.25
    ),
    saved_state=("keys", "values", "offset", "keep", "max_size", "idx"),
)
