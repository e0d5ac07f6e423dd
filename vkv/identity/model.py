"""Identify a model: a digest for each layer, from a sample of its weights' bits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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


def require_model(model: Any, method: str) -> None:
    """Check that ``model`` is a model as mlx_lm.load gives it: that it has ``method``.

    Raises:
        VkvError: It is something else; its type is named.
    """
    if not hasattr(model, method):
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise VkvError(f"model is {kind}, expected a model as mlx_lm.load gives it")


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
    require_model(model, "named_modules")
    layers, rest = parameters(model)
    groups = [*layers, rest]
    digests = _digests(groups)
    arrays = {id(x): x for group in groups for x in group.values()}
    sizes = {key: x.size for key, x in arrays.items()}
    return identified(
        model,
        layers=tuple(digests[:-1]),
        rest=digests[-1],
        total=count(model, sizes),
        config=config_texts(model, float_dtypes(arrays.values())),
        ropes=find(model),
    )


def identified(
    model: Any,
    *,
    layers: tuple[bytes, ...],
    rest: bytes,
    total: int,
    config: tuple[str, str],
    ropes: Sequence[Rope | None],
) -> tuple[Model, tuple[Rope, ...]]:
    """Make an identity, and list the ropes it refers to.

    Args:
        model: Names its architecture.
        layers: Digest of each layer.
        rest: Digest of all other parameters.
        total: Weights of the model.
        config: As ``config_texts`` gives it: recorded, and covered by the id.
        ropes: Of each cache entry.
    """
    recorded, covered = config
    shared = {rope: i for i, rope in enumerate(dict.fromkeys(r for r in ropes if r))}
    body: dict[str, Any] = {
        "type": str(getattr(model, "model_type", type(model).__module__)),
        "config": covered,
        "parameters": total,
        "layers": layers,
        "rest": rest,
    }
    digest = blake3(METHOD + msgspec.msgpack.encode(body, order="sorted")).digest()
    indices = tuple(None if r is None else shared[r] for r in ropes)
    return Model(id=digest, ropes=indices, **body | {"config": recorded}), tuple(shared)


def float_dtypes(arrays: Iterable[Any]) -> set[str]:
    """Return the names of the float dtypes among arrays."""
    return {dtype(x) for x in arrays if "float" in dtype(x)}


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


def parameters(model: Any) -> tuple[list[Arrays], Arrays]:
    """Return the parameters of each layer, by name within it, and all others, by full name."""
    layers = [
        _named(layer)
        for layer in getattr(model, "layers", None) or []
        if hasattr(layer, "parameters")
    ]
    inside = {id(x) for layer in layers for x in layer.values()}
    return layers, {name: x for name, x in _named(model).items() if id(x) not in inside}


def count(model: Any, sizes: Mapping[int, int]) -> int:
    """Count the weights of the model; of a quantized matrix those that it stands for.

    Scales and biases of quantization are not counted.

    Args:
        model: Its modules say which arrays are quantized.
        sizes: Values of each array that counts, by ``id`` of the array.
    """
    counted = dict(sizes)
    for _, module in model.named_modules():
        bits, weight = getattr(module, "bits", None), getattr(module, "weight", None)
        if isinstance(bits, int) and id(weight) in sizes and dtype(weight) == "uint32":
            counted[id(weight)] = sizes[id(weight)] * 32 // bits
            for name in ("scales", "biases"):
                counted.pop(id(getattr(module, name, None)), None)
    return sum(counted.values())


def _named(module: Any) -> Arrays:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))


def _digests(groups: list[Arrays]) -> list[bytes]:
    """Return the BLAKE3 of each group of parameters."""
    import mlx.core as mx

    bits = [[sampled_bits(x) for _, x in sorted(g.items())] for g in groups]
    flat = [x for group in bits for x in group]
    raw = np.array(mx.concatenate(flat)).tobytes() if flat else b""
    digests, start = [], 0
    for group, sampled in zip(groups, bits, strict=True):
        samples = []
        for (name, x), part in zip(sorted(group.items()), sampled, strict=True):
            samples.append((name, dtype(x), x.shape, raw[start : start + part.size]))
            start += part.size
        digests.append(digest(samples))
    return digests


def digest(samples: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    """Return the BLAKE3 of a group: name, dtype, shape and sampled bits of every array (I4)."""
    state = blake3()
    for name, kind, shape, bits in samples:
        state.update(f"{name} {kind} {list(shape)}\n".encode())
        state.update(bits)
    return state.digest()


def sampled_bits(x: Any, indices: tuple[Any, ...] | None = None) -> Any:
    """Return the bytes of values of ``x``, lazily: ``(n * itemsize,)`` uint8.

    Args:
        x: An array.
        indices: One array per axis; by default those of ``spread``.
    """
    import mlx.core as mx

    if not x.size:
        return mx.zeros((0,), mx.uint8)
    word = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[x.itemsize]
    if not x.ndim:
        return x.reshape(1).view(word).view(mx.uint8)
    # One index per axis: flattening first would copy an array that is not contiguous.
    return x.view(word)[_indices(x.shape) if indices is None else indices].view(mx.uint8)


@lru_cache(maxsize=256)
def _indices(shape: tuple[int, ...]) -> tuple[Any, ...]:
    import mlx.core as mx

    return tuple(mx.array(axis, dtype=mx.uint32) for axis in spread(shape))


def spread(shape: tuple[int, ...]) -> list[list[int]]:
    """Return indices, one list per axis, of ``SAMPLE`` values spread over an array."""
    size = math.prod(shape)
    taken = min(size, SAMPLE)
    flat = [i * (size - 1) // max(taken - 1, 1) for i in range(taken)]
    axes: list[list[int]] = []
    for length in reversed(shape):
        axes.append([i % length for i in flat])
        flat = [i // length for i in flat]
    return axes[::-1]


def dtype(x: Any) -> str:
    """Return the dtype of an array as MLX names it."""
    return str(x.dtype).removeprefix("mlx.core.")
