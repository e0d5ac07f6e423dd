"""Fit non-uniform levels (Lloyd-Max), find the nearest, and look levels up.

The fit works on rows that are already in order. A cell of a one-dimensional
quantizer is then a run of its row, so a sweep needs only where the runs end (a
binary search) and their sums; nothing of size samples x levels is ever made.

Fitting is NumPy: MLX sorts this 20 times slower on a CPU. Lookup is MLX.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vkv.codecs.bits import unpack
from vkv.format.dtypes import F16_MAX

__all__ = [
    "OFFSET_STEPS",
    "SCALE_BIAS",
    "by_channel",
    "by_token",
    "lloyd_max",
    "nearest",
    "scaled",
]

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

#: Offsets are counted in this many parts of their scale.
OFFSET_STEPS = 64
#: A scale is a float32 with three bits of mantissa. Its byte is the top of the float's
#: bits, less those of 2**-15: (127 - 15) * 8.
SCALE_BIAS = 896
#: Quantiles that the starting levels are read from.
_STEPS = 64


def lloyd_max(
    ordered: Floats,
    levels: int,
    sweeps: int,
    first: Ints,
    last: Ints,
    weights: Floats | None = None,
) -> NDArray[np.float64]:
    """Fit levels of least squared error, one set per row, by Lloyd's iteration.

    A sweep moves each level to the (weighted) mean of its cell; the error never
    rises. An empty cell keeps its level, so levels stay in order.

    Args:
        ordered: ``(R, N)``, ascending within ``first[r] : last[r]``.
        levels: Number of levels per row.
        sweeps: Number of sweeps after the start.
        first: ``(R,)`` start of the samples of each row.
        last: ``(R,)`` their end, excluded; at least one sample a row.
        weights: ``(R, N)``, not negative, in the order of ``ordered``.

    Returns:
        ``(R, levels)`` ascending.

    Source: Lloyd 1982; the importance weights are Eq. 1 of arXiv 2401.18079.
    """
    fitted = _start(ordered, levels, first, last)
    flat = _flat(ordered if weights is None else ordered * weights)
    mass = None if weights is None else _flat(weights)
    row = np.arange(len(ordered))[:, None] * ordered.shape[1]
    for _ in range(sweeps):
        inside = _above(ordered, (fitted[:, 1:] + fitted[:, :-1]) / 2)
        inside = inside.clip(first[:, None], last[:, None])
        ends = np.concatenate([first[:, None], inside, last[:, None]], axis=1)
        counts = np.diff(ends, axis=1)
        if mass is not None:
            counts = np.where(counts > 0, _cells(mass, ends + row), 0)
        mean = _cells(flat, ends + row) / np.where(counts > 0, counts, 1)
        fitted = np.where(counts > 0, mean, fitted)
    return np.sort(fitted, axis=1)  # rounding can swap neighbours


def _above(ordered: Floats, targets: Floats) -> Ints:
    """Return the index of the first element above each target, row by row, ``(R, K)``."""
    targets = targets.astype(ordered.dtype)
    indices = np.empty(targets.shape, np.int64)
    for i, row in enumerate(ordered):
        indices[i] = row.searchsorted(targets[i], side="right")
    return indices


def _flat(rows: Floats) -> Floats:
    """Join all rows, and a zero, so that the end is an index too."""
    return np.append(rows.ravel(), rows.dtype.type(0))


def _cells(flat: Floats, ends: Ints) -> Floats:
    """Sum ``flat`` over each run between neighbouring ``ends`` ``(R, K)``, empty ones left out."""
    sums: Floats = np.add.reduceat(flat, ends.ravel()).reshape(ends.shape)
    return sums[:, :-1]


def _start(ordered: Floats, levels: int, first: Ints, last: Ints) -> NDArray[np.float64]:
    """Return levels at equal steps of the integral of density^(1/3) (Panter and Dite 1951).

    Plain quantiles put levels where the samples are; the best quantizer puts them
    by the cube root of density, and Lloyd's sweeps close that gap slowly. Between
    two neighbouring quantiles the density is 1 / gap, so the integral grows by
    gap^(2/3).
    """
    at = np.linspace(0, 1, _STEPS + 1) * (last - first - 1)[:, None]
    points = np.take_along_axis(ordered, first[:, None] + np.rint(at).astype(np.int64), axis=1)
    points = points.astype(np.float64)
    steps = np.diff(points, axis=1, prepend=points[:, :1]) ** (2 / 3)
    grown = np.cumsum(steps, axis=1)
    share = (np.arange(levels) + 0.5) / levels * grown[:, -1:]
    right = (grown[:, None, :] <= share[:, :, None]).sum(axis=2).clip(1, _STEPS)
    below, above = (np.take_along_axis(grown, right - i, axis=1) for i in (1, 0))
    left, over = (np.take_along_axis(points, right - i, axis=1) for i in (1, 0))
    span = above - below
    return left + (over - left) * np.where(
        span > 0, (share - below) / np.where(span > 0, span, 1), 0
    )


def nearest(x: NDArray[np.float32], levels: Floats) -> NDArray[np.uint8]:
    """Return the index of the nearest level; a tie goes to the lower one.

    Args:
        x: Any shape.
        levels: ``(L, ...)``, ascending along axis 0, the rest broadcastable to ``x``.
    """
    levels = np.ascontiguousarray(levels, np.float32)
    codes = np.zeros(x.shape, np.uint8)
    for edge in (levels[1:] + levels[:-1]) / 2:
        codes += (x > edge).view(np.uint8)
    return codes


def by_channel(codes: mx.array, bits: int, levels: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Look up codes in one table per head and channel.

    Two neighbouring channels are looked up at once, in a table of all pairs, where
    the tokens are enough to pay for it.

    Args:
        codes: U32 ``(B, H, T, W)`` as packed.
        bits: Bits per code.
        levels: ``(B, H, D, L)`` in the dtype wanted.
        shape: ``(B, H, T, D)``.

    Returns:
        ``shape``, dtype of ``levels``.
    """
    tokens, dim = shape[2:]
    size, dtype = levels.shape[-1], levels.dtype
    if dim % 2 == 0 and tokens >= size * size:
        levels, bits, dim, size = _pairs(levels), 2 * bits, dim // 2, size * size
    count = shape[0] * shape[1] * dim * size
    wide = mx.uint16 if count < 1 << 16 else mx.uint32
    base = mx.arange(0, count, size, dtype=wide).reshape(*shape[:2], 1, dim)
    index = base + unpack(codes, bits, dim).astype(wide)
    return mx.take_along_axis(levels.flatten(), index.flatten(), axis=0).view(dtype).reshape(shape)


def _pairs(levels: mx.array) -> mx.array:
    """Pair channels, ``(B, H, D / 2, L * L)``: entry ``i + L * j`` holds levels i and j."""
    *lead, dim, size = levels.shape
    even, odd = (levels.reshape(*lead, dim // 2, 2, size)[..., i, :] for i in (0, 1))
    paired = (*lead, dim // 2, size, size)
    both = mx.stack(
        [mx.broadcast_to(even[..., None, :], paired), mx.broadcast_to(odd[..., None], paired)],
        axis=-1,
    )
    return both.view(mx.uint32 if levels.itemsize == 2 else mx.uint64)


def scaled(levels: mx.array, scales: mx.array, offsets: mx.array) -> mx.array:
    """Turn shared levels into those of every head and token.

    Args:
        levels: ``(L,)``.
        scales: U8 ``(B, H, T)``.
        offsets: I8 ``(B, H, T)``.

    Returns:
        F32 ``(B, H, T, L)``, within the range of float16.
    """
    bits = (scales.astype(mx.uint32) + SCALE_BIAS) << 20
    scale = mx.where(scales > 0, bits.view(mx.float32), 0)[..., None]
    shift = offsets.astype(mx.float32)[..., None] * (1 / OFFSET_STEPS)
    return mx.clip(scale * (levels.astype(mx.float32) + shift), -F16_MAX, F16_MAX)


def by_token(codes: mx.array, bits: int, levels: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Look up codes in one table per head and token, ``levels`` of shape ``(B, H, T, L)``."""
    return mx.take_along_axis(levels, unpack(codes, bits, shape[-1]), axis=-1)
