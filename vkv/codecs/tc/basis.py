"""Fit, store and read principal axes.

A basis is one array of bytes (U8), a part of the file that uses it or of another one
(rules T20 to T22 of ``spec/v1/codecs/tc.md``)::

    U32             groups G: 1 (axes over all heads) or H (axes of each head)
    U32             rows R of each group, at most n
    U32             columns n: H * D / G
    F32 G*R         scale of each row
    chunks          I16 of G*R rows, ceil(16384 / n) rows a chunk

Row ``j`` of group ``g`` is its integers times its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs.tc import entropy as tc_entropy
from vkv.errors import CodecError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

HEAD = 12
#: Integers that a basis may have for each of its bytes: 4 are usual.
PER_BYTE = 1 << 6
#: Integers in all: 4,096 rows of as many channels.
MOST = 1 << 24
#: Step of a row's integers in units of its root mean square: coarser ones are not independent.
COARSEST = 0.5
#: Most components in one decomposition: its time grows with the cube (2,048: some 3 s).
MAX_COMPONENTS = 2048


@dataclass(frozen=True, slots=True)
class Basis:
    """Rows of the inverse transform: ``ints`` (G, R, n) I16 and ``scale`` (G, R) F32."""

    ints: npt.NDArray[np.int16]
    scale: F32

    @property
    def rows(self) -> F32:
        """Return the rows (G, R, n), F32."""
        return self.ints * self.scale[..., None]

    def dump(self) -> bytes:
        """Return the bytes described above."""
        head = np.array(self.ints.shape, "<u4").tobytes() + self.scale.astype("<f4").tobytes()
        flat = self.ints.reshape(-1, self.ints.shape[-1])
        return head + tc_entropy.pack([flat[a:b] for a, b in _chunks(*flat.shape)])


def load(data: bytes, heads: int, dim: int, tokens: int) -> Basis:
    """Read a basis for ``tokens`` rows of ``heads`` KV heads of ``dim`` channels.

    The last two are remembered: a tensor's is read to be checked and to be used, and
    hundreds of segments may share one.

    Raises:
        CodecError: Its sizes do not fit (T20, T21), a scale is not finite (T22), or its
            chunks are damaged (T11 to T13).
    """
    groups, rows, columns = (int.from_bytes(data[i : i + 4], "little") for i in (0, 4, 8))
    if groups not in (1, heads) or groups * columns != heads * dim or rows > columns:
        raise CodecError(
            f"{groups} groups of {rows} rows and {columns} columns, expected 1 or {heads} groups, "
            f"{heads * dim} columns in all and no more rows than columns",
            rule="T20",
            at="basis",
        )
    start = HEAD + 4 * groups * rows
    free = tokens * heads * dim
    most = min(MOST, free + PER_BYTE * len(data))
    if len(data) < start or groups * rows * columns > most:
        raise CodecError(
            f"{len(data)} bytes for {groups * rows} rows of {columns}, expected at least {start}, "
            f"and at most {most} integers",
            rule="T21",
            at="basis",
        )
    return _read(data, groups, rows, columns)


@lru_cache(maxsize=2)
def _read(data: bytes, groups: int, rows: int, columns: int) -> Basis:
    start = HEAD + 4 * groups * rows
    scale = np.frombuffer(data, "<f4", groups * rows, HEAD).astype(np.float32)
    if not np.isfinite(scale).all():
        raise CodecError("found inf or NaN, expected finite scales", rule="T22", at="basis")
    spans = _chunks(groups * rows, columns)
    tc_entropy.split(data[start:], len(spans), "basis")  # before there is memory for them
    ints = np.empty((groups * rows, columns), np.int16)
    tc_entropy.unpack(data[start:], [ints[a:b].reshape(-1) for a, b in spans], "basis")
    return Basis(ints.reshape(groups, rows, columns), scale.reshape(groups, rows))


def _chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the first row of each chunk and the one behind its last."""
    step = -(-tc_entropy.CHUNK // columns)
    return [(a, min(a + step, rows)) for a in range(0, rows, step)]


def pools(z: F32, heads: int, axes: str) -> F32:
    """Split tokens (N, H*D) into groups (G, N, n): all heads together, or each head."""
    if axes != "head":
        return z[None]
    return np.ascontiguousarray(z.reshape(len(z), heads, -1).swapaxes(0, 1))


def principal(covariance: F64) -> tuple[F64, F64]:
    """Decompose: variances, largest first, and axes as rows, the largest entry of each positive."""
    variance, vectors = np.linalg.eigh(covariance)
    rows = vectors.T[::-1]
    top = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
    return np.maximum(variance[::-1], 0), rows * np.sign(top)


def covariance(z: F32) -> F64:
    """Compute the second moments (n, n) of (N, n)."""
    return (z.T @ z).astype(np.float64) / max(len(z), 1)


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of one kind: of each group the variances on them (n,), and rows (n, n).

    ``rows`` is empty for the channels themselves, which are no axes.
    """

    variance: list[F64]
    rows: list[F64]


def candidates(z: F32, heads: int, axes: str) -> list[Axes]:
    """Fit axes of the kind asked for, or of every kind (``auto``), to tokens (N, H*D)."""
    kinds = [axes] if axes != "auto" else ["none", "head", "joint"]
    moments, fitted = covariance(z), []
    for kind in kinds:
        size = len(moments) // (heads if kind == "head" else 1)
        if kind == "none":
            fitted.append(Axes([np.diag(moments)], []))
        elif axes != "auto" or size <= MAX_COMPONENTS:
            blocks = [moments[i : i + size, i : i + size] for i in range(0, len(moments), size)]
            variance, rows = zip(*map(principal, blocks), strict=True)
            fitted.append(Axes(list(variance), list(rows)))
    return fitted


def projected(z: F32, basis: Basis) -> F64:
    """Return the variances of tokens (N, H*D) on the rows of a basis, those of all groups."""
    moments, size = covariance(z), basis.ints.shape[-1]
    variances = []
    for g, rows in enumerate(basis.rows):
        to = analysis(rows).astype(np.float64)
        block = moments[g * size : (g + 1) * size, g * size : (g + 1) * size]
        variances.append(np.maximum(((block @ to) * to).sum(0), 0))
    return np.concatenate(variances)


def fit(axes: Axes, step: float, tokens: int) -> Basis:
    """Round axes to rows, no finer than a step needs; leave out those that cost too much."""
    columns = len(axes.rows[0])
    chosen = []
    for variance, rows in zip(axes.variance, axes.rows, strict=True):
        keep = worth(variance, step, tokens, columns)
        chosen.append((rows[keep], np.sqrt(variance[keep]) / step))
    count = max(len(rows) for rows, _ in chosen)
    ints = np.zeros((len(chosen), count, columns), np.int16)
    scale = np.ones((len(chosen), count), np.float32)
    for g, (rows, deviation) in enumerate(chosen):
        fine = np.sqrt(columns / max(len(rows), 1)) / np.maximum(deviation, 0.3)
        grid = (np.minimum(fine, COARSEST) / np.sqrt(columns)).astype(np.float32)
        grid = np.maximum(grid, 1 / np.float32(32767))
        ints[g, : len(rows)] = np.rint(rows / grid[:, None])
        scale[g, : len(rows)] = grid
    return Basis(ints, scale)


def worth(variance: F64, step: float, tokens: int, columns: int) -> npt.NDArray[np.bool_]:
    """Return whether the squared error that a component saves is worth the bits of its row.

    A bit is worth what a uniform quantizer of ``step`` pays for it: 2 ln 2 step^2 / 12.
    """
    error = np.minimum(variance, step**2 / 12)
    price = 2 * np.log(2) * step**2 / 12 * row_bits(variance, step, columns)
    pays = (tokens * (variance - error) > price) & (variance > (0.15 * step) ** 2)
    return np.asarray(pays)


def row_bits(variance: F64, step: float, columns: int) -> F64:
    """Return the bits that a row of ``fit`` takes, from the variance of its component."""
    ratio = np.sqrt(variance) / step
    return np.asarray(columns * np.maximum(3.0, 2 + np.log2(np.maximum(ratio, 1e-9))) + 48)


def analysis(rows: F32) -> F32:
    """Return the transform (n, R) whose inverse is ``rows`` (R, n), by least squares.

    The stored rows, not the axes they were rounded from, are inverted: so a coarse
    basis costs a little rate and no accuracy. Rows of zeros give zeros.
    """
    wide = rows.astype(np.float64)
    gram = wide @ wide.T
    empty = np.diag(gram) == 0
    gram[empty, empty] = 1
    return np.asarray(np.linalg.solve(gram, wide).T, np.float32)


def raw(part: mx.array) -> bytes:
    """Return the bytes of a U8 part."""
    return np.array(part).tobytes()


def array(basis: Basis) -> mx.array:
    """Return a basis as the U8 array of a file."""
    return mx.array(np.frombuffer(basis.dump(), np.uint8))
