"""Take checkpoints of live caches, and put their state back.

A cache that lets go of earlier tokens (a ring, chunks, recurrent state) cannot be cut
back to them. A checkpoint keeps what such a cache held after some number of tokens. Caches
that can be cut are not in it: their rows are still there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from vkv.caches.kinds import live
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.errors import CacheError, VkvError
from vkv.identity.tokens import of_tokens

#: Place of a cache among the layers: its index, then those inside lists.
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Hold what the caches held after the first ``tokens`` tokens.

    Attributes:
        tokens: How many.
        layers: Of each cache that lets go of tokens, by its path: what it held.
        message: It stands at the end of a message.
        digest: BLAKE3 of the ids of those tokens, where they are known: what was cut and
            grew otherwise since then has no use for it.
    """

    tokens: int
    layers: Mapping[Path, Snapshot] = field(repr=False)
    message: bool = False
    digest: bytes | None = None

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether it belongs to a prompt with these leading ids."""
        if len(ids) < self.tokens:
            return False
        return self.digest is None or self.digest == of_tokens(ids[: self.tokens])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays it holds."""
        return sum(
            value.x.nbytes
            for taken in self.layers.values()
            for value in taken.values.values()
            if value.x is not None
        )


class CheckpointedCache(list[Any]):
    """A list of caches that carries checkpoints along, also into a deep copy.

    Attributes:
        checkpoints: In ascending order of ``tokens``.
    """

    def __init__(self, caches: Sequence[Any], checkpoints: Sequence[Checkpoint] = ()):
        super().__init__(caches)
        self.checkpoints = tuple(checkpoints)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedCache:
        """Copy the caches; checkpoints never change, so copies share them."""
        return CheckpointedCache([copy.deepcopy(c, memo) for c in self], self.checkpoints)


def checkpoints_of(caches: Sequence[Any]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that a list of caches carries; none for a plain list."""
    return caches.checkpoints if isinstance(caches, CheckpointedCache) else ()


def keep_fitting(caches: Sequence[Any], ids: Sequence[int]) -> None:
    """Drop the checkpoints that do not belong to the ids in the caches."""
    if isinstance(caches, CheckpointedCache):
        caches.checkpoints = tuple(c for c in caches.checkpoints if c.fits(ids))


def leaves(caches: Sequence[Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every cache that holds no others, with its path."""
    for i, cache in enumerate(caches):
        children = live.children(cache)
        if children:
            yield from leaves(children, (*at, i))
        else:
            yield (*at, i), cache


def lets_go(caches: Sequence[Any]) -> bool:
    """Return whether any of the caches may let go of tokens, so that checkpoints are of use."""
    return any(live.lets_go(cache) for _, cache in leaves(caches))


def take(
    caches: Sequence[Any],
    tokens: int,
    *,
    message: bool = False,
    ids: Sequence[int] | None = None,
) -> Checkpoint:
    """Take a checkpoint of caches that hold ``tokens`` tokens.

    Of a ring only the rows that a later token can see are kept.

    Args:
        caches: One per layer.
        tokens: How many they hold.
        message: They end with a message.
        ids: The ids of the tokens, where they are known.
    """
    layers = {
        path: _owned(live.visible(live.snapshot(cache)))
        for path, cache in leaves(caches)
        if live.lets_go(cache)
    }
    digest = None if ids is None else of_tokens(ids[:tokens])
    return Checkpoint(tokens, layers, message, digest)


def _owned(taken: Snapshot) -> Snapshot:
    """Copy views of a larger buffer, so that the buffer can be freed."""
    values = {name: _contiguous(value) for name, value in taken.values.items()}
    mx.eval([value.x for value in values.values()])
    return replace(taken, values=values, provenance=None)


def _contiguous(value: Value) -> Value:
    return value if value.x is None else replace(value, x=mx.contiguous(value.x))


def check_point(tokens: Any) -> None:
    """Refuse what is no number of tokens to go back to."""
    if type(tokens) is not int or tokens < 1:
        raise VkvError(f"{tokens!r} tokens to go back to, expected a whole number above 0")


def reachable(caches: Sequence[Any], tokens: int) -> int | None:
    """Return the most tokens, up to ``tokens``, that the caches can go back to.

    Returns:
        ``tokens`` if all of them can be cut there; else a checkpoint's; ``None`` if there is
        none so early.
    """
    limits = [(path, live.shortest(cache)) for path, cache in leaves(caches)]

    def fits(target: int, layers: Mapping[Path, Snapshot]) -> bool:
        return all(
            path in layers or (least is not None and least <= target) for path, least in limits
        )

    if fits(tokens, {}):
        return tokens
    earlier = (c for c in checkpoints_of(caches) if c.tokens <= tokens)
    return max((c.tokens for c in earlier if fits(c.tokens, c.layers)), default=None)


def go_back(caches: Sequence[Any], tokens: int, held: int) -> None:
    """Bring every cache back to its first ``tokens`` of ``held`` tokens, in place, or none.

    Later checkpoints are dropped.

    Args:
        caches: One cache per layer.
        tokens: What ``reachable`` returned.
        held: How many tokens the caches hold.

    Raises:
        CacheError: A cache can neither be cut so far nor is in a checkpoint (L8).
    """
    found = {c.tokens: c for c in checkpoints_of(caches)}.get(tokens)
    layers = found.layers if found is not None else {}
    replaced = {
        path: restore(layers[path])
        for path, cache in leaves(caches)
        if path in layers and not _can_cut(cache, tokens)
    }
    others = [cache for path, cache in leaves(caches) if path not in replaced]
    live.cut(others if replaced else caches, tokens, held)
    for path, cache in leaves(caches):
        if path in replaced:
            _become(cache, replaced[path])
    if isinstance(caches, CheckpointedCache):
        caches.checkpoints = tuple(c for c in caches.checkpoints if c.tokens <= tokens)


def _can_cut(cache: Any, tokens: int) -> bool:
    least = live.shortest(cache)
    return least is not None and least <= tokens


def restore(taken: Snapshot) -> Any:
    """Make the live cache that a checkpoint holds; its arrays are shared, not copied."""
    loaded = {}
    for name, value in taken.values.items():
        if value.x is None:
            raise CacheError("a checkpoint holds encoded rows, expected arrays", rule="L8")
        loaded[name] = mx.array(value.x)  # another handle: caches assign into theirs
    return live.make(taken.kind, dict(taken.scalars), loaded)


def _become(cache: Any, other: Any) -> None:
    """Give a cache the state of another of its class, so that whoever holds it goes back too."""
    vars(cache).clear()
    vars(cache).update(vars(other))
