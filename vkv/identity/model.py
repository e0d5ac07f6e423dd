"""Identify a model: a digest for each layer, from a sample of its weights' bits."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from vkv.errors import VkvError
from vkv.format.schema import Model, Rope
from vkv.identity.config import config_texts
from vkv.identity.ropes import find

#: Values taken of each parameter, the first and the last among them. Training and
#: fusing move nearly all values, so a few tell, and hashing all of 8B would take
#: seconds. A change to a few rows of one matrix can escape.
SAMPLE = 64
#: Stands before what ``id`` digests; another way to make it is another text.
METHOD = b"vkv model 1\n"

Arrays = dict[str, Any]


def of_model(model: Any) -> tuple[Model, tuple[Rope, ...]]:
    """Identify a live model of mlx-lm.

    Raw bits are sampled and hashed, never computed numbers, so that ``id`` is the same
    on every backend. So it covers all but the ropes, which are computed on the device
    and recognized by one release and not by another: they follow from the configuration
    unless someone changes a live model, and ``differences`` compares them by value.
    About 20 ms for 300 parameters.

    Returns:
        The identity, and the ropes that its ``ropes`` refer to, by cache entry.

    Raises:
        VkvError: It is no model.
    """
    if not hasattr(model, "named_modules"):
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise VkvError(f"model is {kind}, expected a model as mlx_lm.load gives it")
    layers, rest = _parameters(model)
    digests = _digests([*layers, rest])
    ropes = find(model)
    shared = {rope: i for i, rope in enumerate(dict.fromkeys(r for r in ropes if r))}
    everything = {id(x): x for group in (*layers, rest) for x in group.values()}.values()
    config, covered = config_texts(model, {_dtype(x) for x in everything if _is_float(x)})
    body: dict[str, Any] = {
        "type": str(getattr(model, "model_type", type(model).__module__)),
        "config": covered,
        "parameters": _count(model, everything),
        "layers": tuple(digests[:-1]),
        "rest": digests[-1],
    }
    digest = blake3(METHOD + msgspec.msgpack.encode(body, order="sorted")).digest()
    indices = tuple(None if r is None else shared[r] for r in ropes)
    return Model(id=digest, ropes=indices, **body | {"config": config}), tuple(shared)


def model_id(model: Any) -> bytes:
    """Return the id of a model, given as such (32 bytes, or 64 hex digits) or live.

    Raises:
        VkvError: It is neither.
    """
    if isinstance(model, str):
        if not re.fullmatch("[0-9a-fA-F]{64}", model):
            text = f"model is {model[:80]!r}, expected a live model, or an id of 64 hex digits"
            raise VkvError(text)
        return bytes.fromhex(model)
    if isinstance(model, bytes):
        if len(model) != 32:
            raise VkvError(f"model is an id of {len(model)} bytes, expected 32")
        return model
    return of_model(model)[0].id


def _parameters(model: Any) -> tuple[list[Arrays], Arrays]:
    """Return the parameters of each layer, by name within it, and all others, by full name."""
    layers = [
        _named(layer)
        for layer in getattr(model, "layers", None) or []
        if hasattr(layer, "parameters")
    ]
    inside = {id(x) for layer in layers for x in layer.values()}
    return layers, {name: x for name, x in _named(model).items() if id(x) not in inside}


def _count(model: Any, arrays: Collection[Any]) -> int:
    """Count the weights of the model; of a quantized matrix those that it stands for.

    Scales and biases of quantization are not counted.
    """
    sizes = {id(x): x.size for x in arrays}
    for _, module in model.named_modules():
        bits, weight = getattr(module, "bits", None), getattr(module, "weight", None)
        if isinstance(bits, int) and weight is not None and _dtype(weight) == "uint32":
            sizes[id(weight)] = weight.size * 32 // bits
            for name in ("scales", "biases"):
                sizes.pop(id(getattr(module, name, None)), None)
    return sum(sizes.values())


def _named(module: Any) -> Arrays:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))


def _digests(groups: list[Arrays]) -> list[bytes]:
    """Return the BLAKE3 of each group: name, dtype, shape and sampled bits of every array."""
    import mlx.core as mx

    bits = [[_bits(x) for _, x in sorted(group.items())] for group in groups]
    flat = [x for group in bits for x in group]
    raw = np.array(mx.concatenate(flat)).tobytes() if flat else b""
    digests, start = [], 0
    for group, sampled in zip(groups, bits, strict=True):
        digest = blake3()
        for (name, x), part in zip(sorted(group.items()), sampled, strict=True):
            digest.update(f"{name} {_dtype(x)} {list(x.shape)}\n".encode())
            digest.update(raw[start : start + part.size])
            start += part.size
        digests.append(digest.digest())
    return digests


def _bits(x: Any) -> Any:
    """Return the bytes of the sampled values of ``x``, lazily: ``(n * itemsize,)`` uint8."""
    import mlx.core as mx

    if not x.size:
        return mx.zeros((0,), mx.uint8)
    word = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[x.itemsize]
    if not x.ndim:
        x = x.reshape(1)
    # One index per axis: flattening first would copy an array that is not contiguous.
    return x.view(word)[_indices(x.shape)].view(mx.uint8)


@lru_cache(maxsize=256)
def _indices(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return indices, one array per axis, of ``SAMPLE`` values spread over an array."""
    import mlx.core as mx

    size = math.prod(shape)
    count = min(size, SAMPLE)
    flat = [i * (size - 1) // max(count - 1, 1) for i in range(count)]
    axes: list[list[int]] = []
    for length in reversed(shape):
        axes.append([i % length for i in flat])
        flat = [i // length for i in flat]
    return tuple(mx.array(axis, dtype=mx.uint32) for axis in reversed(axes))


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("mlx.core.")


def _is_float(x: Any) -> bool:
    return "float" in _dtype(x)
