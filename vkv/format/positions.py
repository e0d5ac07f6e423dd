"""Describe where the rows of a cached tensor stand in the sequence of tokens. No MLX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from vkv.errors import CacheError

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


def ring_positions(length: int, offset: int, keep: int, idx: int) -> Spans:
    """Return the absolute positions of the slots of a ``RotatingKVCache``, in storage order.

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
