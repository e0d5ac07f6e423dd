"""Packed caches: fresh ones for a model, and those of a file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vkv import identity
from vkv.arrays.cache_file import CacheFile
from vkv.caches.encoded import Kept
from vkv.caches.kinds.live import kind_of
from vkv.caches.packed.cache import PackedKVCache, Rows
from vkv.caches.saving.save import CodecSpec, wish
from vkv.caches.saving.write_plan import Wish
from vkv.codecs import registry
from vkv.codecs.protocol import DTYPES
from vkv.errors import VkvError
from vkv.format.kinds import KINDS
from vkv.format.layers import segment_shape
from vkv.format.schema import Layer, Rope, Tensor


def make_prompt_cache(
    model: Any, codec: CodecSpec, *, residual: int = 0, max_tokens: int | None = None
) -> list[Any]:
    """Caches that quantize while the model generates.

    Every KVCache that mlx-lm would make for ``model`` becomes a packed one; others
    (rotating, recurrent) stay mlx-lm's own.

    Args:
        model: An mlx-lm model.
        codec: As ``vkv.save`` takes it.
        residual: Newest tokens kept exact at least.
        max_tokens: Refuse to grow beyond.

    Returns:
        One cache per layer, to be passed as ``prompt_cache``.

    Raises:
        CodecError, UnknownCodecError: ``codec`` is refused.
    """
    from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches

    asked = wish(codec)
    caches = mlx_lm_caches(model)
    ropes = identity.find(model)
    ropes = ropes if len(ropes) == len(caches) else [None] * len(caches)
    return [
        _packed(cache, asked, rope, residual, max_tokens)
        for cache, rope in zip(caches, ropes, strict=True)
    ]


def _packed(
    cache: Any, asked: Wish, rope: Rope | None, residual: int, max_tokens: int | None
) -> Any:
    kind = kind_of(cache)
    if kind is None or not kind.packs:
        return cache
    keys = Rows(asked.keys, "keys", rope, residual)
    return PackedKVCache(keys, Rows(asked.values, "values", None, residual), max_tokens)


def packed_layer(file: CacheFile, layer: Layer, at: str) -> PackedKVCache | None:
    """A packed cache that holds the codes of a stored layer; ``None`` if it has none."""
    if not KINDS[layer.kind].packs or not layer.tensors:
        return None
    rows = {
        name: _rows(file, tensor, name, f"{at}.{name}") for name, tensor in layer.tensors.items()
    }
    if all(r is None for r in rows.values()):
        return None
    keys, values = (
        rows[n] or _exact(file, layer.tensors[n], n, f"{at}.{n}") for n in ("keys", "values")
    )
    return PackedKVCache(keys, values)


def _rows(file: CacheFile, tensor: Tensor, name: str, at: str) -> Rows | None:
    coded = [s for s in tensor.segments if not s.is_raw]
    if not coded:
        return None
    last = coded[-1]
    kept = [_kept(file, tensor, i, at) for i in range(len(tensor.segments))]
    tail = kept.pop() if tensor.segments[-1].is_raw else None
    rope = None if last.rope is None else file.header.ropes[last.rope]
    x = tail.parts["data"] if tail else _no_tokens(tensor)
    codec = registry.resolve(last.codec, last.version, last.params)
    return Rows(registry.parse(last.codec), name, rope, 0, kept, x, codec)


def _exact(file: CacheFile, tensor: Tensor, name: str, at: str) -> Rows:
    """Rows that are stored raw and stay exact."""
    kept = [_kept(file, tensor, i, at) for i in range(len(tensor.segments))]
    return Rows(registry.parse("raw"), name, None, 0, kept, _no_tokens(tensor))


def _no_tokens(tensor: Tensor) -> mx.array:

    return mx.zeros((*tensor.shape[:-2], 0, tensor.shape[-1]), DTYPES[tensor.dtype])


def _kept(file: CacheFile, tensor: Tensor, index: int, at: str) -> Kept:
    segment = tensor.segments[index]
    shape = segment_shape(tensor, segment)
    try:
        codec, parts = file.parts(segment, shape)
    except VkvError as exc:
        raise exc.within(f"{at}.segments[{index}]") from None
    stored = file.header.tensors
    roles = {part: stored[where].role for part, where in segment.parts.items()}
    rope = None if segment.rope is None else file.header.ropes[segment.rope]
    return Kept(codec, parts, shape[-2], roles, rope)
