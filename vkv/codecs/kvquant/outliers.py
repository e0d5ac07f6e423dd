"""Choose the elements that are kept exactly, and list them.

Elements are counted in *token order* (token, batch row, head, channel). An outlier
costs one byte, the number of elements since the one before, and its value; a last
byte says how many follow. So one token costs what it would among a thousand, places
cannot repeat or go backwards, and a list is cut or joined at any token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vkv.codecs.protocol import finite
from vkv.errors import CodecError

__all__ = ["dense_range", "exactly", "join", "pack", "place", "prefix", "validate"]

#: A byte of this value skips that many elements and places none.
SKIP = 255

Bytes = NDArray[np.uint8]
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def dense_range(ordered: Floats, centre: Floats, count: int) -> tuple[Ints, Ints]:
    """Find what remains of each row without the ``count`` elements farthest from its centre.

    Args:
        ordered: ``(R, N)``, ascending.
        centre: ``(R,)``.
        count: Outliers per row, fewer than ``N``.

    Returns:
        ``first, last``, each ``(R,)``: the rest is ``ordered[r, first:last]``.
    """
    size = ordered.shape[1]
    below = centre[:, None] - ordered[:, :count]
    above = ordered[:, size - count :] - centre[:, None]
    # Both sides fall towards the centre; the j-th of one side is chosen when it beats
    # the (count - 1 - j)-th of the other.
    first = (below > above).sum(axis=1)
    return first, size - count + first


def exactly(mask: Mask, ties: Mask, count: Ints | int) -> Mask:
    """Fill ``mask`` ``(R, N)`` up to ``count`` a row with the first ``ties`` of the row.

    Args:
        mask: What is chosen without doubt; changed in place.
        ties: What is as far as the last one chosen, and not in ``mask``.
        count: ``(R,)`` or one for all.
    """
    short = count - mask.sum(axis=1)
    rows = np.flatnonzero(short > 0)
    few = ties[rows]
    mask[rows] |= few & (np.cumsum(few, axis=1) <= short[rows, None])
    return mask


def pack(mask: Mask, x: mx.array) -> tuple[mx.array, mx.array]:
    """List the elements of ``x`` under ``mask``.

    Args:
        mask: ``(B, H, T, D)``.
        x: The same shape.

    Returns:
        ``gaps`` U8 ``(G,)`` and ``outliers`` F16 ``(N,)``, both in token order.
    """
    heads, tokens, dim = mask.shape[1:]
    flat = np.flatnonzero(mask)
    row, channel = np.divmod(flat, dim)
    head, token = np.divmod(row, tokens)
    places = (token * (mask.shape[0] * heads) + head) * dim + channel
    order = np.argsort(places)
    values = mx.take(x.flatten(), mx.array(flat[order].astype(np.uint32)))
    return _gaps(places[order], mask.size), values.astype(mx.float16)


def _gaps(places: Ints, elements: int) -> mx.array:
    """Code gaps between ascending places, the end behind them: ``SKIP`` bytes, then the rest."""
    skips, rest = np.divmod(np.diff(places, prepend=-1, append=elements) - 1, SKIP)
    ends = np.cumsum(skips + 1)
    out = np.full(ends[-1], SKIP, np.uint8)
    out[ends - 1] = rest
    return mx.array(out)


def _places(gaps: mx.array) -> Ints:
    """Find the places of the outliers, and the number of elements behind them."""
    steps = np.array(gaps)
    ends: Ints = np.cumsum(steps.astype(np.int64) + (steps != SKIP)) - 1
    return np.asarray(ends[steps != SKIP])


def validate(gaps: mx.array, outliers: mx.array, elements: int) -> None:
    """Check a list against the number of elements it is about.

    Raises:
        CodecError: It does not end where they end, or has another number of values
            (Q6); a value is not finite (Q7).
    """
    if not gaps.size:
        raise CodecError(f"no end, expected {elements}", rule="Q6", at="gaps")
    wide = gaps.astype(mx.int64)
    sums = mx.stack([(wide != SKIP).astype(mx.int64).sum(), wide.sum(), wide[-1]])
    named, passed, last = (int(n) for n in np.array(sums))
    named, passed = named - 1, passed + named - 1
    if passed != elements or last == SKIP:
        raise CodecError(f"{passed} elements, expected {elements}", rule="Q6", at="gaps")
    if named != outliers.size:
        raise CodecError(f"{outliers.size} values, expected {named}", rule="Q6", at="outliers")
    if not finite(outliers):
        raise CodecError("found inf or NaN, expected finite values", rule="Q7", at="outliers")


def place(dense: mx.array, gaps: mx.array, outliers: mx.array) -> mx.array:
    """Put the outliers of a valid list into ``dense`` ``(B, H, T, D)``."""
    count = outliers.size
    if not count:
        return dense
    batch, heads, tokens, dim = dense.shape
    real = (gaps != SKIP).astype(mx.int32)
    # The end and all skips go to a slot behind the outliers, which is then cut off.
    slot = mx.where(real > 0, mx.cumsum(real) - 1, count)
    steps = mx.cumsum(gaps.astype(mx.int32) + real) - 1
    at = mx.put_along_axis(mx.zeros(count + 1, mx.int32), slot, steps, axis=0)[:count]
    row, channel = mx.divmod(at, dim)
    token, head = mx.divmod(row, batch * heads)
    index = (head * tokens + token) * dim + channel
    flat = mx.put_along_axis(dense.flatten(), index, outliers.astype(dense.dtype), axis=0)
    return flat.reshape(dense.shape)


def prefix(gaps: mx.array, outliers: mx.array, elements: int) -> tuple[mx.array, mx.array]:
    """Cut a list after the first ``elements`` elements."""
    places = _places(gaps)[:-1]
    places = places[places < elements]
    return _gaps(places, elements), outliers[: len(places)]


def join(lists: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Make one list of several ``(gaps, outliers)`` that follow each other.

    The end of one becomes part of the first gap of the next: only the bytes of these
    two are touched.
    """
    pieces = [np.array(lists[0][0])]
    for gaps, _ in lists[1:]:
        before, after = pieces.pop(), np.array(gaps)
        cut = len(before) - _run(before[::-1], start=1)
        first = _run(after)
        gap = int(before[cut:].sum(dtype=np.int64) + after[:first].sum(dtype=np.int64))
        joint = np.array(_gaps(np.zeros(0, np.int64), gap))
        pieces += [before[:cut], np.concatenate([joint, after[first:]])]
    values = mx.concatenate([values for _, values in lists])
    return mx.array(np.concatenate(pieces)), values


def _run(gaps: Bytes, start: int = 0) -> int:
    """Return the bytes of the first gap; with ``start`` 1, of the last one in reversed order."""
    ends = np.flatnonzero(gaps[start:] != SKIP)
    return int(ends[0]) + 1 if len(ends) else len(gaps)
