"""Find the kind of a live cache, take it apart, make it again, and cut it.

mlx-lm is imported only when a cache is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vkv.caches import provenance
from vkv.caches.kinds import arrays, cache_list, chunked, concatenate, kv, quantized, rotating
from vkv.caches.kinds.adapter import Adapter, Loaded, Packed, Snapshot
from vkv.errors import CacheError
from vkv.format.kinds import KINDS, Kind

#: Kind -> its adapter; every kind of ``vkv.format.kinds`` has one.
ADAPTERS: dict[str, Adapter] = {
    module.ADAPTER.kind.name: module.ADAPTER
    for module in (kv, concatenate, quantized, rotating, chunked, arrays, cache_list)
}


def cache_class(kind: Kind) -> Any:
    """Return the class of a kind in the installed mlx-lm.

    Raises:
        CacheError: That release has no such class (L1).
    """
    from mlx_lm.models import cache

    classes = [getattr(cache, name) for name in kind.class_names if hasattr(cache, name)]
    if not classes:
        raise CacheError(f"the installed mlx-lm has no {kind.class_names[0]}", rule="L1")
    return classes[0]


def kind_of(cache: Any) -> Kind | None:
    """Return the kind of a cache whose class is exactly one of mlx-lm's known ones."""
    from mlx_lm.models import cache as classes

    name = type(cache).__name__
    exact = getattr(classes, name, None) is type(cache)
    return next((k for k in KINDS.values() if exact and name in k.class_names), None)


def snapshot(cache: Any) -> Snapshot:
    """Take a live cache apart.

    Raises:
        CacheError: Not exactly one of the known classes (L1), or a content that
            no file can hold (L2). A subclass is refused by name: it may keep
            state that its base class does not know.
    """
    if isinstance(cache, Packed):
        return cache.snapshot()
    adapter = _adapter(cache)
    scalars = adapter.scalars(cache)
    inner = [snapshot(child) for child in adapter.children(cache)]
    taken = Snapshot(adapter.kind.name, scalars, adapter.values(cache, scalars), inner)
    return replace(_computed(taken), provenance=provenance.of(cache))


def _adapter(cache: Any) -> Adapter:
    kind = kind_of(cache)
    if kind is not None:
        return ADAPTERS[kind.name]
    known = ", ".join(kind.class_names[0] for kind in KINDS.values())
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    hint = "; extract one sequence of the batch first" if "Batch" in name else ""
    raise CacheError(f"cannot store a {name}; known caches are {known}{hint}", rule="L1")


def _computed(taken: Snapshot) -> Snapshot:
    """Compute what is still lazy, before anything is written.

    MLX can compute an array only in the thread that began it.
    """
    try:
        mx.eval([(v.x, [run.parts for run in v.encoded]) for v in taken.values.values()])
    except RuntimeError as exc:
        raise CacheError(
            f"holds an array that cannot be computed here ({exc}); call mx.eval on the cache in "
            "the thread that filled it",
            rule="L2",
        ) from None
    return taken


def visible(taken: Snapshot) -> Snapshot:
    """Return a snapshot without the rows that no later token can see, children included."""
    inner = [visible(child) for child in taken.children]
    return ADAPTERS[taken.kind].visible(replace(taken, children=inner))


def make(kind: str, scalars: dict[str, int], loaded: Loaded) -> Any:
    """Make a live cache of mlx-lm's class.

    Args:
        kind: Name of its kind.
        scalars: Its numbers.
        loaded: Its tensors by name; the caches of a CacheList under ``children``.
    """
    return ADAPTERS[kind].make(cache_class(KINDS[kind]), scalars, loaded)


def children(cache: Any) -> Sequence[Any]:
    """Return the caches inside a cache: of a CacheList, else none."""
    return () if isinstance(cache, Packed) else _adapter(cache).children(cache)


def nbytes(cache: Any) -> int:
    """Return the bytes of the rows and states that a cache holds, children included.

    The padding of a growing buffer, and rows that no later token sees, are left out;
    nothing is computed.
    """
    if isinstance(cache, Packed):
        return int(cache.nbytes)
    adapter = _adapter(cache)
    scalars = adapter.scalars(cache)
    taken = Snapshot(adapter.kind.name, scalars, adapter.values(cache, scalars))
    values = adapter.visible(taken).values.values()
    own = sum(value.x.nbytes for value in values if value.x is not None)
    codes = sum(x.nbytes for v in values for run in v.encoded for x in run.parts.values())
    return own + codes + sum(map(nbytes, adapter.children(cache)))


def lets_go(cache: Any) -> bool:
    """Tell if a cache may let go of earlier tokens, so that it cannot be cut back to them."""
    return not isinstance(cache, Packed) and _adapter(cache).kind.lets_go


def shortest(cache: Any) -> int | None:
    """Return the fewest tokens that a cache can be cut back to, ``None`` if it cannot be cut.

    Raises:
        CacheError: It is of an unknown class (L1).
    """
    limits = [least for _, least in _limits(cache)]
    known = [least for least in limits if least is not None]
    return max(known, default=0) if len(known) == len(limits) else None


def _limits(cache: Any) -> list[tuple[str, int | None]]:
    """Return the class name and the limit of a cache and of all caches inside it."""
    name = type(cache).__name__
    if isinstance(cache, Packed):
        return [(name, 0)]
    adapter = _adapter(cache)
    own = name, adapter.kind.shortest(adapter.scalars(cache))
    return [own, *(limit for child in adapter.children(cache) for limit in _limits(child))]


def inner(cache: Any) -> Sequence[Any]:
    """Return the caches inside a CacheList; none for another cache.

    Raises:
        CacheError: It is of an unknown class (L1).
    """
    return () if isinstance(cache, Packed) else _adapter(cache).children(cache)


def offsets(caches: Sequence[Any]) -> list[int]:
    """Return the number of tokens in each cache, and cache inside one, that counts them.

    Raises:
        CacheError: One is of an unknown class (L1).
    """
    counts = list[int]()
    for cache in caches:
        if isinstance(cache, Packed):
            counts.append(cache.offset)
            continue
        adapter = _adapter(cache)
        scalars = adapter.scalars(cache)
        counts += [scalars["offset"]] if "offset" in scalars else []
        counts += offsets(adapter.children(cache))
    return counts


def cut(caches: Sequence[Any], tokens: int, held: int) -> None:
    """Keep the first ``tokens`` of ``held`` tokens in every layer, in place, or change none.

    Raises:
        CacheError: A layer cannot be cut so far back; names it and says from where on it
            can be (L8).
    """
    if tokens >= held:
        return
    for i, cache in enumerate(caches):
        for name, least in _limits(cache):
            if least is not None and least <= tokens:
                continue
            limit = f"can be cut to {least} tokens or more, not to {tokens}"
            limit = "holds only its present state" if least is None else limit
            raise CacheError(
                f"cannot drop the last {held - tokens} tokens: a {name} {limit}; "
                "only the exact prompt, continued, can use this cache; load it again, or compute "
                "it with vkv.prefill(model, tokens, checkpoints=…) and go back to a checkpoint",
                rule="L8",
                at=f"layers[{i}]",
            )
    for cache in caches:
        _cut(cache, tokens)


def _cut(cache: Any, tokens: int) -> None:
    if isinstance(cache, Packed):
        cache.trim(max(cache.offset - tokens, 0))
        return
    adapter = _adapter(cache)
    adapter.cut(cache, tokens)
    for child in adapter.children(cache):
        _cut(child, tokens)


def sequences(cache: Any) -> int:
    """Return the number of sequences that a cache holds; 1 where it does not say."""
    if hasattr(cache, "caches"):
        return max(map(sequences, cache.caches), default=1)
    held = getattr(cache, "keys", None)
    keys = held[0] if isinstance(held, tuple | list) else held
    return 1 if keys is None else int(keys.shape[0])


def unused(lengths: list[int]) -> set[int]:
    """Return which caches stay empty while others fill: some models never use them."""
    return {i for i, n in enumerate(lengths) if n == 0} if any(lengths) else set()
