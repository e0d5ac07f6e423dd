"""Adapt mlx-lm's QuantizedKVCache: affine codes, which are stored as they are."""

from __future__ import annotations

from typing import Any

from vkv.caches.encoded import EncodedRun
from vkv.caches.kinds.adapter import Adapter, Loaded, Value, first_rows, numbers, trim
from vkv.codecs.affine import Affine
from vkv.codecs.protocol import NAMES
from vkv.errors import CacheError
from vkv.format.kinds import KINDS


def _values(cache: Any, scalars: dict[str, int]) -> dict[str, Value]:
    if cache.keys is None or scalars["offset"] <= 0:
        return {}
    return {name: _codes(cache, name) for name in ("keys", "values")}


def _codes(cache: Any, name: str) -> Value:
    arrays = getattr(cache, name)
    if not isinstance(arrays, tuple | list) or len(arrays) != len(Affine.roles):
        raise CacheError(f"{type(arrays).__name__}, expected three arrays", rule="L2", at=name)
    named = zip(Affine.roles, arrays, strict=True)
    parts = {part: first_rows(x, cache.offset, f"{name}.{part}") for part, x in named}
    scales = parts["scales"]
    codec = Affine(bits=cache.bits, group=cache.group_size, scale=NAMES[scales.dtype])
    shape = (*scales.shape[:-1], scales.shape[-1] * cache.group_size)
    codec.validate(parts, shape)
    run = EncodedRun(codec, parts, scales.shape[-2], codec.roles)
    return Value(shape, scales.dtype, encoded=(run,))


def _make(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = cls(group_size=scalars["group_size"], bits=scalars["bits"])
    for name, (codec, parts) in loaded.items():
        if (codec.bits, codec.group) != (cache.bits, cache.group_size):
            raise CacheError(
                f"codes of {codec.bits} bits in groups of {codec.group}, the cache takes "
                f"{cache.bits} in {cache.group_size}",
                rule="L4",
                at=name,
            )
        setattr(cache, name, tuple(parts[part] for part in Affine.roles))
    cache.offset = scalars["offset"]
    return cache


ADAPTER = Adapter(
    kind=KINDS["quantized"],
    scalars=lambda cache: numbers(cache, offset="offset", bits="bits", group_size="group_size"),
    values=_values,
    make=_make,
    cut=trim,
    saved_numbers=(
        ("offset", "group_size", "bits"),
        ("step", "offset", "group_size", "bits"),  # before 0.25
    ),
    saved_state=("keys", "values", "offset", "group_size", "bits"),
)
