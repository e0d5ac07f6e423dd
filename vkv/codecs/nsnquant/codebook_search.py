"""Find the nearest codeword of many short vectors, exactly and fast.

Vectors are rounded to multiples of 1/128 and codewords are multiples of 1/256, so a
score is a sum of integers below 2^24: exact in F32 in any order, TF32 included. The
answer does not depend on the machine, nor on what else the call carries.

On a GPU all codewords are scored: in registers (CUDA), or by one matrix product. On a
CPU vectors are first sorted into 256 cells (one bit a coordinate: above a threshold or
not) and each cell is scored against the codewords that win there, an eighth of them on
average.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs.kernels import cuda as kernels_cuda
from vkv.codecs.kernels.device import on_cpu, on_cuda

__all__ = ["GRID", "LIMIT", "STEPS", "Search", "best", "extended", "packed"]

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

#: Codewords are multiples of 1/GRID, below LIMIT.
GRID, LIMIT = 256, 4
#: Vectors are rounded to multiples of 1/STEPS for the comparison, and kept below EDGE.
STEPS, EDGE = 128, 8
#: Rows of one score matrix on a GPU: 256 MB of scores.
ROWS = 1 << 18
#: Multiplications up to which OpenBLAS stays in one thread. More threads gain nothing on
#: products this thin, and lose much when other processes want the cores.
SINGLE = 1 << 18
#: Random vectors of each cell that find the codewords winning there.
PROBES = 1024


class Search:
    """Finds, for each vector, the index of the nearest row of a codebook.

    Args:
        codebook: ``(K, V)``, K at most 256, multiples of 1/256 below 4.
        magnitude: Vectors are magnitudes (no negative coordinates).
        cosine: Compare angles: the largest inner product with rows of equal norm.
    """

    def __init__(self, codebook: npt.NDArray[np.float32], *, magnitude: bool, cosine: bool):
        self.magnitude = magnitude
        self._rows = packed(codebook.astype(np.float64), cosine=cosine)
        #: Above the median of |N(0, 1)|, where the lists are shortest.
        self._threshold = 0.9 * STEPS if magnitude else 0.0
        columns = np.round(codebook.T * GRID).astype(np.float32)
        half = np.zeros(len(codebook)) if cosine else _half(columns)
        self._columns, self._half = mx.array(columns), mx.array(half.astype(np.float32))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the index of the nearest codeword, U8 ``(N,)``, of vectors F32 ``(N, V)``."""
        edge = STEPS * EDGE - 1
        if on_cpu():
            return mx.array(self._by_cell(np.rint(np.asarray(x) * STEPS).clip(-edge, edge)))
        if on_cuda():
            return kernels_cuda.nearest(x, self._whole)
        return self.plain(x)

    def plain(self, x: mx.array) -> mx.array:
        """Search with plain MLX operations."""
        edge = STEPS * EDGE - 1
        x = mx.clip(mx.round(x * STEPS), -edge, edge)
        return mx.concatenate([self._score(x[i : i + ROWS]) for i in range(0, len(x), ROWS)])

    def _score(self, x: mx.array) -> mx.array:
        index = mx.argmax(x @ self._columns - self._half, axis=-1).astype(mx.uint8)
        mx.eval(index)  # one score matrix at a time
        return index

    def _by_cell(self, x: npt.NDArray[np.float32]) -> Bytes:
        cells = np.packbits((x[:, :8] > self._threshold).reshape(-1), bitorder="little")
        if x.shape[1] < 8:
            cells = np.stack([cells & 15, cells >> 4], axis=1).reshape(-1)[: len(x)]
        order = np.argsort(cells, kind="stable")
        rows = extended(np.take(x, order, axis=0))
        found, start = np.empty(len(x), np.uint8), 0
        ends = np.cumsum(np.bincount(cells, minlength=len(self._lists)))
        for end, lines in zip(ends, self._lists, strict=True):
            if end > start:
                found[start:end] = best(rows[start:end], lines)
            start = end
        index = np.empty(len(x), np.uint8)
        index[order] = found
        return index

    @cached_property
    def _whole(self) -> mx.array:
        """Return codewords and half their squared norms, F32 ``(K, V + 1)``."""
        return mx.concatenate([self._columns.T, self._half[:, None]], axis=1)

    @cached_property
    def _lists(self) -> list[Array]:
        """Return, for each cell, the rows that win there."""
        won = (np.flatnonzero(np.bincount(best(p, self._rows))) for p in self._probes())
        return [np.ascontiguousarray(self._rows[names]) for names in won]

    def _probes(self) -> Iterator[Array]:
        """Draw normal vectors conditioned on each cell in turn; a third of them stretched."""
        dim = self._rows.shape[1] - 1
        rng = np.random.Generator(np.random.PCG64(0))
        draw = rng.standard_normal((8 * PROBES, dim)) * STEPS
        draw[::3] *= 1.5
        draw = np.round(np.abs(draw) if self.magnitude else draw)
        above = draw > self._threshold
        columns = range(dim)
        low = np.stack([draw[~above[:, j], j][:PROBES] for j in columns], axis=1)
        high = np.stack([draw[above[:, j], j][:PROBES] for j in columns], axis=1)
        low[:, 8:] = high[:, 8:] = draw[:PROBES, 8:]
        bits = np.arange(min(dim, 8))
        for cell in range(1 << len(bits)):
            side = np.zeros(dim, bool)
            side[: len(bits)] = cell >> bits & 1
            yield extended(np.where(side, high, low))


def packed(codebook: Array, *, cosine: bool) -> Array:
    """Return rows ``(K, V + 1)``: an extended vector times row k is ``256 * score + 255 - k``.

    So the largest product names its row, and in F64 it is exact.
    """
    rows = np.round(codebook * GRID)
    half = np.zeros(len(rows)) if cosine else _half(rows.T)
    index = np.arange(len(rows))
    return np.concatenate([256 * rows, (255 - index - 256 * half)[:, None]], axis=1)


def best(x: Array, rows: Array) -> Bytes:
    """Return the index, in the whole codebook, of the row of ``packed`` with the best score."""
    step = max(1, SINGLE // rows.size)
    top = np.empty(len(x))
    for i in range(0, len(x), step):
        np.maximum.reduce(rows @ x[i : i + step].T, axis=0, out=top[i : i + step])
    index: Bytes = (255 - (top.astype(np.int64) & 255)).astype(np.uint8)
    return index


def _half(columns: npt.NDArray[np.floating]) -> Array:
    """Return half the squared norms, in the unit of products of vectors and codewords."""
    half: Array = np.round((columns.astype(np.float64) ** 2).sum(0) * STEPS / (2 * GRID))
    return half


def extended(x: npt.NDArray[np.floating]) -> Array:
    """Append a column of ones to ``x``."""
    out = np.ones((len(x), x.shape[1] + 1))
    out[:, :-1] = x
    return out
