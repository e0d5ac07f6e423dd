"""Notice a step that ended in the middle of a model's layers.

Layers that count their tokens then differ in length. Recurrent state counts nothing, but it is
another array after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def is_interrupted(before: States, after: States, grown: bool | None) -> bool:
    """Return whether some layers took part in a step and others did not.

    Args:
        before: The states when the step was asked for.
        after: The states now.
        grown: The layers that count tokens have more than then; ``None`` if there are none.
            With the states this tells of a step that ended between both.
    """
    moved = {
        any(old is not new for old, new in zip(before[path], after[path], strict=True))
        for path in before.keys() & after.keys()
        if any(x is not None for x in (*before[path], *after[path]))
    }
    return len(moved | ({grown} - {None})) > 1
