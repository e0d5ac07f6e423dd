"""Make fresh packed caches for a model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vkv import identity
from vkv.caches.attention import hook
from vkv.caches.kinds.live import inner, kind_of
from vkv.caches.packed.cache import PackedKVCache
from vkv.caches.packed.encoder import Encoder
from vkv.caches.packed.notes import planned, unpacked
from vkv.caches.packed.packable import first_packable
from vkv.caches.packed.rows import Rows
from vkv.caches.saving.request import CodecPair, CodecSpec, codec_pair
from vkv.format.schema import Rope
from vkv.identity.model import require_model


def make_prompt_cache(
    model: Any, codec: CodecSpec, *, residual: int = 0, max_tokens: int | None = None
) -> list[Any]:
    """Make caches that quantize while the model generates.

    Every KVCache that mlx-lm would make for ``model`` becomes a packed one, also inside a
    CacheList. Others stay mlx-lm's own: those that are bounded (rotating) or recurrent,
    MLA latents, which ``vkv.save`` stores raw too, and shapes that the codec refuses. A
    warning says which layers these are. To learn the shapes, the graph of one token is
    built, and nothing of it computed.

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
    recipe = _Recipe(codec_pair(codec), residual, max_tokens, hook.Route())
    require_model(model, "layers")
    for text in planned(request.codec for request in recipe.codecs.both()):
        warnings.warn(text, UserWarning, stacklevel=2)
    hook.install()
    tried = _caches(model, recipe)
    failure = _run(model, tried)
    if failure is not None and _run(model, _own(model)) is None:
        text = f"nothing is packed: the model does not run on packed caches ({failure!r})"
        warnings.warn(text, UserWarning, stacklevel=2)
        return _own(model)
    for text in () if failure else unpacked(tried):
        warnings.warn(text, UserWarning, stacklevel=2)
    return _caches(model, recipe, None if failure else tried)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Hold the options that all packed caches of a model share."""

    codecs: CodecPair
    residual: int
    max_tokens: int | None
    route: hook.Route

    def make(self, rope: Rope | None) -> PackedKVCache:
        keys = Rows(Encoder(self.codecs.keys, "keys", rope, self.residual))
        values = Rows(Encoder(self.codecs.values, "values", None, self.residual))
        return PackedKVCache(keys, values, self.max_tokens, hook.Attention(self.route))


def _own(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches

    return list(mlx_lm_caches(model))


def _run(model: Any, caches: list[Any]) -> Exception | None:
    """Build the graph of one token; return what the model raised, if it did."""
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as exc:  # a model of any kind: some take more than tokens
        return exc
    return None


def _caches(model: Any, recipe: _Recipe, tried: list[Any] | None = None) -> list[Any]:
    """Make packed caches wherever one can be, and was of use when ``tried``."""
    caches = _own(model)
    ropes = identity.find(model)
    ropes = ropes if len(ropes) == len(caches) else [None] * len(caches)
    return [
        _packed(cache, recipe, rope, None if tried is None else tried[i])
        for i, (cache, rope) in enumerate(zip(caches, ropes, strict=True))
    ]


def _packed(cache: Any, recipe: _Recipe, rope: Rope | None, tried: Any) -> Any:
    if children := inner(cache):
        first = first_packable([kind is not None and kind.packs for kind in map(kind_of, children)])
        olds = inner(tried) if tried is not None else [None] * len(children)
        cache.caches = tuple(
            _packed(child, recipe, rope, old) if i == first else child
            for i, (child, old) in enumerate(zip(children, olds, strict=True))
        )
        return cache
    kind = kind_of(cache)
    if kind is None or not kind.packs:
        return cache
    if isinstance(tried, PackedKVCache) and not tried.encodes:
        return cache
    return recipe.make(rope)
