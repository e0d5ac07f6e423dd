"""Where the rows of a cached tensor stand in the sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, overload

import mlx.core as mx
import numpy as np

from vkv.errors import CacheError

#: Where the rows of a tensor stand: the first position of consecutive rows, or one
#: position for each row, in storage order.
Positions = int | range | Sequence[int] | mx.array

#: ``mx.fast.rope`` takes an int32 offset.
MAX_POSITION = (1 << 31) - 1


class Spans(Sequence[int]):
    """Positions as runs of consecutive ones, which take no memory for each row."""

    def __init__(self, spans: Iterable[range]):
        self.spans: list[range] = []
        for span in filter(len, spans):
            if self.spans and self.spans[-1].stop == span.start:
                span = range(self.spans.pop().start, span.stop)
            self.spans.append(span)

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Spans: ...
    def __getitem__(self, index: int | slice) -> int | Spans:
        if isinstance(index, int):
            start = range(len(self))[index]
            return self[start : start + 1].spans[0].start
        start, stop, _ = index.indices(len(self))
        cut = []
        for span in self.spans:
            cut.append(span[max(start, 0) : max(stop, 0)])
            start, stop = start - len(span), stop - len(span)
        return Spans(cut)


def runs(positions: Positions, count: int) -> list[range]:
    """Group the positions of ``count`` rows into runs of consecutive ones.

    Raises:
        CacheError: Not ``count`` positions, or one outside 0 to ``MAX_POSITION`` (L5).
    """
    where = rows(positions, count)
    if len(where) != count:
        raise CacheError(f"{len(where)} positions, expected {count}", rule="L5", at="positions")
    if not count:
        return []
    if isinstance(where, range):
        spans = [where]
    elif isinstance(where, Spans):
        spans = where.spans
    else:
        cuts = (np.flatnonzero(np.diff(where) != 1) + 1).tolist()
        spans = [
            range(int(where[a]), int(where[a]) + b - a) for a, b in pairwise([0, *cuts, count])
        ]
    low, high = min(span[0] for span in spans), max(span[-1] for span in spans)
    if low < 0 or high > MAX_POSITION:
        raise CacheError(
            f"positions {low} to {high}, expected 0 to {MAX_POSITION}", rule="L5", at="positions"
        )
    return spans


def rows(positions: Positions, count: int) -> Any:
    """A range or runs where the positions are so anyhow, else an int64 array."""
    if isinstance(positions, int):
        return range(positions, positions + count)
    if isinstance(positions, Spans) or (isinstance(positions, range) and positions.step == 1):
        return positions
    try:
        return np.array(positions, dtype=np.int64)
    except OverflowError:
        raise CacheError(
            f"positions past 64 bits, expected 0 to {MAX_POSITION}", rule="L5", at="positions"
        ) from None


def ring_positions(length: int, offset: int, keep: int, idx: int) -> Spans:
    """Absolute positions of the slots of a ``RotatingKVCache``, in storage order.

    Slots up to ``keep`` hold the first tokens for good. Of the others, those before
    ``idx`` hold the newest tokens and those from ``idx`` on the older ones; with
    ``idx`` at the end the order is that of time.

    Args:
        length: Slots that hold a token.
        offset: Tokens that the cache has seen.
        keep: Slots that are never overwritten.
        idx: Slot after the newest token.

    Raises:
        CacheError: Numbers that no ring has (L5).
    """
    if length > offset or min(length, offset, keep, idx) < 0:
        found = f"{length} rows, offset {offset}, keep {keep}, idx {idx}"
        raise CacheError(f"no ring has {found}", rule="L5", at="positions")
    if length == offset:
        return Spans([range(length)])
    if not keep <= idx <= length:
        raise CacheError(
            f"idx {idx}, expected {keep} to {length} in a wrapped ring", rule="L5", at="positions"
        )
    newest, oldest = offset - (idx - keep), offset - (length - keep)
    return Spans([range(keep), range(newest, offset), range(oldest, newest)])
