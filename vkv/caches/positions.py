"""Group the positions of rows into runs that one rotation serves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from vkv.errors import CacheError
from vkv.format.positions import MAX_POSITION, Spans

#: Where the rows of a tensor stand: the first position of consecutive rows, or one
#: position for each row, in storage order.
Positions = int | range | Sequence[int] | mx.array


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
    """Return positions as a range or runs where they are so already, else as an int64 array."""
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
