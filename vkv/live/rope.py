"""Rotary embeddings of cached keys, undone and redone exactly.

A file stores the keys of a lossy codec as they were before the rotary embedding;
there they have fewer directions to spend bits on. Both ways go through
``mx.fast.rope`` in float32 with the same angles, and and only the sign of ``scale``
differs: they cancel to a few ulps at any position, since an angle's own rounding
cancels too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from vkv.errors import CacheError, HeaderError
from vkv.header import Rope

#: Where the rows of a tensor stand: the first position of consecutive rows, or one
#: position for each row, in storage order.
Positions = int | range | Sequence[int] | mx.array

#: ``mx.fast.rope`` takes an int32 offset.
MAX_POSITION = (1 << 31) - 1
#: Largest error of there and back, relative to the largest key; 2e-7 is usual.
TOLERANCE = 1e-5
#: Rows at either end that ``usable`` tries.
SAMPLE = 32


def rotate(x: mx.array, rope: Rope, positions: Positions, *, inverse: bool = False) -> mx.array:
    """Apply ``rope`` to keys, or undo it.

    Forward, the result has the bits that the model's own rope layer gives for ``x``
    in float32. The work is one ``mx.fast.rope`` for each run of consecutive
    positions; a wrapped ring has at most three.

    Args:
        x: Keys, ``(B, H, T, D)``, any float dtype.
        rope: Rotates the first ``rope.dims`` of ``D`` channels.
        positions: Of the ``T`` rows.
        inverse: Undo instead of apply.

    Returns:
        ``(B, H, T, D)`` in float32.

    Raises:
        HeaderError: ``rope`` cannot rotate ``D`` channels (H2).
        CacheError: Not ``T`` positions, or one outside 0 to ``MAX_POSITION`` (L5).
    """
    check(rope, x.shape[-1])
    spans = runs(positions, x.shape[-2])
    x = x.astype(mx.float32)
    if rope.mscale != 1.0 and not inverse:
        x = x.at[..., : rope.dims].multiply(rope.mscale)
    sign = -1.0 if inverse else 1.0
    if len(spans) == 1:
        x = _turn(x, rope, spans[0].start, sign)
    elif spans:
        cuts = np.cumsum([len(span) for span in spans[:-1]]).tolist()
        pieces = zip(mx.split(x, cuts, axis=-2), spans, strict=True)
        x = mx.concatenate([_turn(p, rope, s.start, sign) for p, s in pieces], axis=-2)
    if rope.mscale != 1.0 and inverse:
        x = x.at[..., : rope.dims].divide(rope.mscale)
    return x


def _turn(x: mx.array, rope: Rope, offset: int, sign: float) -> mx.array:
    return mx.fast.rope(
        x,
        rope.dims,
        traditional=rope.traditional,
        base=rope.base,
        scale=sign * rope.scale,
        offset=offset,
        freqs=None if rope.freqs is None else _freqs(rope.freqs),
    )


@lru_cache(maxsize=64)
def _freqs(values: tuple[float, ...]) -> mx.array:
    """The array of a header's ``freqs``, made once for all layers that share them."""
    return mx.array(values, dtype=mx.float32)


def check(rope: Rope, dim: int) -> None:
    """Refuse a rope that ``mx.fast.rope`` cannot apply to ``dim`` channels.

    Raises:
        HeaderError: Says what was found (H2).
    """
    factors = [rope.scale, rope.mscale, 1.0 if rope.base is None else rope.base]
    if rope.dims % 2 or not 0 < rope.dims <= dim:
        found = f"{rope.dims} dims, expected an even number up to {dim}"
    elif (rope.base is None) == (rope.freqs is None):
        found = "base and freqs both or neither, expected one of them"
    elif rope.freqs is not None and len(rope.freqs) != rope.dims // 2:
        found = f"{len(rope.freqs)} freqs, expected {rope.dims // 2}"
    elif not all(math.isfinite(n) and n for n in factors):
        found = f"scale, mscale, base {factors}, expected finite numbers other than 0"
    else:
        return
    raise HeaderError(found, rule="H2", at="rope")


def usable(rope: Rope, keys: mx.array, positions: Positions) -> bool:
    """Whether undoing and redoing ``rope`` gives ``keys`` back.

    Tried in numbers, on the first and the last ``SAMPLE`` rows. Keys of another
    form, rows that are not finite, and a rope that does not fit are not usable.

    Args:
        rope: The rope that the keys went through.
        keys: ``(B, H, T, D)``, any float dtype.
        positions: Of the ``T`` rows.
    """
    if keys.ndim != 4 or not mx.issubdtype(keys.dtype, mx.floating):  # B, H, T, D
        return False
    try:
        where = _rows(positions, keys.shape[-2])
        ends = (slice(SAMPLE), slice(-SAMPLE, None))
        return all(_comes_back(keys[..., end, :], rope, where[end]) for end in ends)
    except (HeaderError, CacheError):
        return False


def _comes_back(x: mx.array, rope: Rope, positions: Positions) -> bool:
    x = x.astype(mx.float32)
    back = rotate(rotate(x, rope, positions, inverse=True), rope, positions)
    if not x.size:
        return True
    return bool(mx.abs(back - x).max() <= TOLERANCE * mx.abs(x).max())  # false for NaN


def runs(positions: Positions, rows: int) -> list[range]:
    """Group the positions of ``rows`` rows into runs of consecutive ones.

    Raises:
        CacheError: Not ``rows`` positions, or one outside 0 to ``MAX_POSITION`` (L5).
    """
    where = _rows(positions, rows)
    if len(where) != rows:
        raise CacheError(f"{len(where)} positions, expected {rows}", rule="L5", at="positions")
    if not rows:
        return []
    if isinstance(where, range):
        spans = [where]
    else:
        cuts = (np.flatnonzero(np.diff(where) != 1) + 1).tolist()
        spans = [range(int(where[a]), int(where[a]) + b - a) for a, b in pairwise([0, *cuts, rows])]
    low, high = min(span[0] for span in spans), max(span[-1] for span in spans)
    if low < 0 or high > MAX_POSITION:
        raise CacheError(
            f"positions {low} to {high}, expected 0 to {MAX_POSITION}", rule="L5", at="positions"
        )
    return spans


def _rows(positions: Positions, rows: int) -> Any:
    """A range where the positions are consecutive anyhow, else an int64 array."""
    if isinstance(positions, int):
        return range(positions, positions + rows)
    if isinstance(positions, range) and positions.step == 1:
        return positions
    try:
        return np.array(positions, dtype=np.int64)
    except OverflowError:
        raise CacheError(
            f"positions past 64 bits, expected 0 to {MAX_POSITION}", rule="L5", at="positions"
        ) from None


def ring_positions(length: int, offset: int, keep: int, idx: int) -> range | tuple[int, ...]:
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
        return range(length)
    if not keep <= idx <= length:
        raise CacheError(
            f"idx {idx}, expected {keep} to {length} in a wrapped ring", rule="L5", at="positions"
        )
    newest, oldest = offset - (idx - keep), offset - (length - keep)
    return tuple(chain(range(keep), range(newest, offset), range(oldest, newest)))
