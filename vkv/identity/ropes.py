"""Find the rotary embedding that a model applies to the keys it caches.

A wrong answer here costs quality, never correctness: undoing a rope that was not
applied and redoing it at load is an exact round trip all the same, only the codec
then sees keys that are harder to code. So ropes are recognized by their exact
class wherever they hang in a layer, and refused where the sources say that the
cached keys are not what the layer's rope returned. So read for every model of mlx-lm
0.31.3 and 0.32.2, and seen in numbers for those that a CPU runs.

Of what stands between rope and cache, llama4's norm does no harm: without weights it
commutes with a rotation. Every model rotates by the cache's offset, so positions
follow from the cache alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vkv.format.schema import Rope


def find(model: Any) -> list[Rope | None]:
    """Return the rope of each entry of ``model``'s prompt cache.

    ``None`` where keys are cached without a rope, or with one that cannot be undone
    exactly: a base that moves with the length (dynamic NTK), MLA latents, an unknown
    class, an entry that holds no keys or two sets of them.

    Args:
        model: A model of mlx-lm: it has ``layers`` and, if it needs one, ``make_cache``.
    """
    layers = list(getattr(model, "layers", None) or [])
    ropes = [_of_layer(layer) for layer in layers]
    if not hasattr(model, "make_cache"):
        return ropes
    entries = model.make_cache()
    return [
        rope if _holds_keys(entry) else None
        for entry, rope in zip(entries, _per_entry(layers, ropes, len(entries)), strict=True)
    ]


def _holds_keys(entry: Any) -> bool:
    """Tell whether an entry has exactly one set of keys: an indexer's has its own rope."""
    children = getattr(entry, "caches", None) or [entry]
    return sum(hasattr(child, "keys") for child in children) == 1


def _per_entry(layers: list[Any], ropes: list[Rope | None], entries: int) -> list[Rope | None]:
    """Assign ropes to cache entries, where not every layer has one entry."""
    count = len(ropes)
    if count and entries % count == 0:
        return ropes * (entries // count)  # nanbeige, iquestloopcoder: layers run in loops
    attending = [
        r for x, r in zip(layers, ropes, strict=True) if getattr(x, "self_attn", None) is not None
    ]
    if len(attending) == entries:
        return attending  # nemotron-nas: some layers have no attention
    if entries < count == len(attending):
        return ropes[:entries]  # gemma3n, gemma4: the last layers share the keys of others
    return [None] * entries


def _of_layer(layer: Any) -> Rope | None:
    if not hasattr(layer, "named_modules"):
        return None
    modules = dict(layer.named_modules())
    ropes = {name: m for name, m in modules.items() if _class(m) in _READERS}
    if len(ropes) != 1:
        return None
    ((name, module),) = ropes.items()
    if not _rotates_keys(modules[name.rpartition(".")[0]]):
        return None
    try:
        return _READERS[_class(module)](module)
    except (AttributeError, TypeError, ValueError):
        return None  # another release's class of the same name


def _rotates_keys(attention: Any) -> bool:
    """Tell whether the keys that ``attention`` caches begin with what its rope returned."""
    if hasattr(attention, "kv_lora_rank"):
        return False  # MLA: a latent, or keys whose last channels are rotated
    if not getattr(attention, "use_rope", True):
        return False
    name = _class(attention)
    if name == "mlx_lm.models.cohere2.Attention":
        return bool(attention.use_sliding_window)  # its rope is unused in the other layers
    # afm7 scales channels (k_norm.weight) and rounds to 8 bits after the rope.
    return not name.startswith("mlx_lm.models.afm7.")


def _class(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _plain(rope: Any) -> Rope:
    return Rope(
        dims=rope.dims,
        traditional=bool(rope.traditional),
        base=float(rope.base),
        scale=float(rope.scale),
    )


def _with_freqs(rope: Any) -> Rope:
    return Rope(
        dims=rope.dims, traditional=bool(rope.traditional), freqs=_values(rope._freqs, rope.dims)
    )


def _yarn(rope: Any) -> Rope:
    return Rope(
        dims=rope.dims,
        traditional=bool(rope.traditional),
        freqs=_values(rope._freqs, rope.dims),
        mscale=float(rope.mscale),
    )


def _su_scaled(rope: Any) -> Rope:
    return Rope(dims=rope.dim, freqs=_values(rope._freqs, rope.dim), mscale=float(rope._scale))


def _values(freqs: Any, dims: int) -> tuple[float, ...]:
    if freqs.shape != (dims // 2,):
        raise ValueError(f"freqs of shape {freqs.shape}, expected ({dims // 2},)")
    return tuple(freqs.tolist())


#: By exact class. A subclass may rotate otherwise.
_READERS: dict[str, Callable[[Any], Rope]] = {
    "mlx.nn.layers.positional_encoding.RoPE": _plain,
    "mlx_lm.models.rope_utils.Llama3RoPE": _with_freqs,
    "mlx_lm.models.rope_utils.ProportionalRoPE": _with_freqs,
    "mlx_lm.models.rope_utils.YarnRoPE": _yarn,
    "mlx_lm.models.rope_utils.SuScaledRoPE": _su_scaled,
}
