"""Make fresh packed caches for a model."""

from __future__ import annotations

from typing import Any

from vkv import identity
from vkv.caches.kinds.live import kind_of
from vkv.caches.packed.cache import PackedKVCache
from vkv.caches.packed.encoder import Encoder
from vkv.caches.packed.rows import Rows
from vkv.caches.saving.request import CodecPair, CodecSpec, codec_pair
from vkv.errors import VkvError
from vkv.format.schema import Rope


def make_prompt_cache(
    model: Any, codec: CodecSpec, *, residual: int = 0, max_tokens: int | None = None
) -> list[Any]:
    """Make caches that quantize while the model generates.

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

    asked = codec_pair(codec)
    if not hasattr(model, "layers"):
        found = type(model).__name__
        raise VkvError(f"model is a {found}, expected a model as mlx_lm.load gives it")
    caches = mlx_lm_caches(model)
    ropes = identity.find(model)
    ropes = ropes if len(ropes) == len(caches) else [None] * len(caches)
    return [
        _packed(cache, asked, rope, residual, max_tokens)
        for cache, rope in zip(caches, ropes, strict=True)
    ]


def _packed(
    cache: Any, asked: CodecPair, rope: Rope | None, residual: int, max_tokens: int | None
) -> Any:
    kind = kind_of(cache)
    if kind is None or not kind.packs:
        return cache
    keys = Rows(Encoder(asked.keys, "keys", rope, residual))
    return PackedKVCache(keys, Rows(Encoder(asked.values, "values", None, residual)), max_tokens)
