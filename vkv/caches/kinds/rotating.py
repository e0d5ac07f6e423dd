"""Adapt mlx-lm's RotatingKVCache: the first ``keep`` tokens and a ring of the newest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from vkv.caches.kinds.adapter import (
    Adapter,
    Loaded,
    Snapshot,
    Value,
    keys_and_values,
    numbers,
    trim,
    with_rows,
)
from vkv.format.kinds import KINDS


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = with_rows(cls(scalars["max_size"], keep=scalars["keep"]), loaded)
    cache.offset, cache._idx = scalars["offset"], scalars["idx"]
    return cache


def _visible(taken: Snapshot) -> Snapshot:
    """Keep the first ``keep`` and the newest rows, ``max_size`` in all.

    A prefill in one call leaves all its rows, in the order of time; mlx-lm drops the
    others before the next token reads them.
    """
    keep, size, rows = taken.scalars["keep"], taken.scalars["max_size"], taken.scalars["idx"]
    shapes = {value.shape[-2] for value in taken.values.values()}
    if shapes != {rows} or not keep < size < rows:
        return taken
    values = {name: _first_and_last(v, keep, size) for name, v in taken.values.items()}
    return replace(taken, scalars=taken.scalars | {"idx": size}, values=values)


def _first_and_last(value: Value, keep: int, size: int) -> Value:
    assert value.x is not None  # a ring holds no codes
    last = value.x[..., value.x.shape[-2] - (size - keep) :, :]
    x = mx.concatenate([value.x[..., :keep, :], last], axis=-2) if keep else last
    return replace(value, shape=x.shape, x=x)


ADAPTER = Adapter(
    kind=KINDS["rotating"],
    scalars=lambda cache: numbers(
        cache, offset="offset", keep="keep", max_size="max_size", idx="_idx"
    ),
    values=lambda cache, scalars: keys_and_values(cache, scalars["offset"]),
    make=_make,
    cut=trim,
    visible=_visible,
    saved_numbers=(
        ("keep", "max_size", "offset", "idx"),
        ("keep", "max_size", "step", "offset", "idx"),  # before 0.25
    ),
    saved_state=("keys", "values", "offset", "keep", "max_size", "idx"),
)
