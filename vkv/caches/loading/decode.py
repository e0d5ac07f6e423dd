"""Decode the stored tensors of a layer: segments decoded, rotated forward, joined."""

from __future__ import annotations

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile
from vkv.arrays.deferred import DeferredVerification
from vkv.caches.encoded import EncodedRun
from vkv.caches.rope import rotate
from vkv.codecs.protocol import DTYPES
from vkv.format.kinds import positions
from vkv.format.schema import Layer


def decode_segment(
    file: CacheFile,
    layer: Layer,
    name: str,
    index: int,
    start: int,
    at: str,
    deferred: DeferredVerification | None = None,
) -> tuple[EncodedRun, mx.array]:
    """Read segment ``index`` of tensor ``name``, whose first row is row ``start`` of the tensor.

    Returns:
        Its codes, and what they decode to, keys with their rope.

    Raises:
        VkvError: As ``CacheFile.parts``; the message starts with ``at``.
    """
    tensor = layer.tensors[name]
    segment = tensor.segments[index]
    place = f"{at}.{name}.segments[{index}]"
    codec, parts, x = file.decode_segment(tensor, index, place, deferred=deferred)
    stored = file.header.tensors
    roles = {part: stored[key].role for part, key in segment.parts.items()}
    rope = None if segment.rope is None else file.header.ropes[segment.rope]
    tokens = x.shape[-2] if x.ndim > 1 else 0
    run = EncodedRun(codec, parts, tokens, roles, rope)
    if rope is None:
        return run, x
    where = positions(layer, tensor.shape[-2])[start : start + tokens]
    return run, rotate(x, rope, where, dtype=DTYPES[tensor.dtype])


def decode(
    file: CacheFile,
    layer: Layer,
    name: str,
    at: str,
    deferred: DeferredVerification | None = None,
) -> mx.array:
    """Decode tensor ``name`` of ``layer``, all of it. Raises as ``decode_segment``."""
    pieces, start = [], 0
    for index, segment in enumerate(layer.tensors[name].segments):
        pieces.append(decode_segment(file, layer, name, index, start, at, deferred)[1])
        start += segment.tokens or 0
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-2)
