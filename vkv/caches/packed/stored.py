"""Make a packed cache of a stored layer: its codes as they are."""

from __future__ import annotations

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile
from vkv.caches.attention import hook
from vkv.caches.encoded import EncodedRun
from vkv.caches.packed.cache import PackedKVCache
from vkv.caches.packed.encoder import Encoder
from vkv.caches.packed.rows import Rows
from vkv.codecs import registry
from vkv.codecs.protocol import DTYPES
from vkv.errors import VkvError
from vkv.format.kinds import KINDS
from vkv.format.layers import segment_shape
from vkv.format.schema import Layer, Tensor


def packed_layer(file: CacheFile, layer: Layer, at: str, route: hook.Route) -> PackedKVCache | None:
    """Return a packed cache that holds the codes of a stored layer; ``None`` if it has none.

    Args:
        file: An open file.
        layer: One of its layers, or of their children.
        at: Path of the layer for messages, ``layers[3]``.
        route: Shared by the caches of the file.

    Raises:
        VkvError: As ``CacheFile.parts``; the message starts with ``at``.
    """
    if not KINDS[layer.kind].packs or not any(_is_coded(t) for t in layer.tensors.values()):
        return None
    keys, values = (
        _rows(file, layer.tensors[name], name, f"{at}.{name}") for name in ("keys", "values")
    )
    # MLX computes an array only in the thread that began it; a prompt may be used in another.
    mx.eval(keys.arrays, values.arrays)
    hook.install()
    return PackedKVCache(keys, values, attention=hook.Attention(route))


def _is_coded(tensor: Tensor) -> bool:
    return not all(segment.is_raw for segment in tensor.segments)


def _rows(file: CacheFile, tensor: Tensor, name: str, at: str) -> Rows:
    """Return the rows of one tensor; what is stored raw in all of it stays exact."""
    runs = [_run(file, tensor, i, at) for i in range(len(tensor.segments))]
    coded = [run for run in runs if not run.codec.traits.verbatim]
    tail = mx.zeros((*tensor.shape[:-2], 0, tensor.shape[-1]), DTYPES[tensor.dtype])
    if not coded:
        return Rows(Encoder(registry.parse("raw"), name), tuple(runs), tail)
    if runs[-1].codec.traits.verbatim:
        tail = runs.pop().parts["data"]
    last = coded[-1]
    encoder = Encoder(registry.parse(last.codec.id), name, last.rope, codec=last.codec)
    return Rows(encoder, tuple(runs), tail)


def _run(file: CacheFile, tensor: Tensor, index: int, at: str) -> EncodedRun:
    segment = tensor.segments[index]
    shape = segment_shape(tensor, segment)
    try:
        codec, parts = file.parts(segment, shape)
    except VkvError as exc:
        raise exc.within(f"{at}.segments[{index}]") from None
    stored = file.header.tensors
    roles = {part: stored[where].role for part, where in segment.parts.items()}
    rope = None if segment.rope is None else file.header.ropes[segment.rope]
    return EncodedRun(codec, parts, shape[-2], roles, rope)
