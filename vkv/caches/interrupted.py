"""Notice a step that ended in the middle of a model's layers.

Layers that count their tokens then differ in length. Recurrent state counts nothing, but it is
another array after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vkv.caches.checkpoints.record import Path, leaves
from vkv.caches.kinds import live

#: The arrays of each cache that does not count its tokens.
States = dict[Path, tuple[Any, ...]]


def states(caches: Sequence[Any]) -> States:
    """Return the arrays of every cache that does not count its tokens."""
    return {
        path: tuple(cache.cache)
        for path, cache in leaves(caches)
        if (kind := live.kind_of(cache)) is not None and kind.content == "slots"
    }


@dataclass(frozen=True, slots=True)
class Mark:
    """Remember caches as they are before the next step.

    Attributes:
        states: The arrays that recurrent state consists of.
        length: Tokens that every layer holds; ``None`` if no layer counts them.
        planned: Tokens that they are to hold once all steps are done; ``None`` if unknown.
    """

    states: States = field(repr=False)
    length: int | None
    planned: int | None

    def is_interrupted(self, caches: Sequence[Any], length: int | None) -> bool:
        """Return whether some layers may have taken part in a step and others not.

        Between the steps of one prompt, recurrent state tells of no step but the first. So
        state that moved while tokens are still to be computed counts as interrupted.

        Args:
            caches: As they are now.
            length: Tokens that every layer holds now.
        """
        now = states(caches)
        moved = {
            any(old is not new for old, new in zip(self.states[path], now[path], strict=True))
            for path in self.states.keys() & now.keys()
            if any(x is not None for x in (*self.states[path], *now[path]))
        }
        if self.length is None or length is None:
            return len(moved) > 1
        unfinished = self.planned is not None and length < self.planned
        return len(moved | {length > self.length}) > 1 or (unfinished and True in moved)
