"""Encode one tensor with any step; compute once what does not depend on the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

import mlx.core as mx
import numpy as np

from vkv.codecs.protocol import Parts
from vkv.codecs.tc import basis as tc_basis
from vkv.codecs.tc import blocks as tc_blocks
from vkv.codecs.tc.basis import F64, Basis
from vkv.format.limits import MAX_EXPANSION

#: Steps between which a rate is searched, in deviations.
FINEST, COARSEST = 2.0**-10, 2.0**5
#: How far below the target a search may end, and its most trials.
SLACK, TRIALS = 0.005, 6
#: A finer step is tried so often where too few bytes are left (H10).
FINER, TRIES = 0.8, 48
#: Coarser ones, in deviations of the largest component, leave nothing.
EMPTY = 4.0


@dataclass(frozen=True, slots=True)
class Coded:
    """Hold what a step gave: the parts, and the step taken, finer than asked for under H10."""

    parts: Parts
    step: float

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts, a basis of another file too."""
        return sum(p.nbytes for p in self.parts.values())


class Coder:
    """Codes one tensor with any step.

    Args:
        x: ``(B, H, T, D)``.
        axes: As in ``Tc``.
        table: A basis made from other texts, which takes no room in the file.

    Raises:
        CodecError: A value is not finite (T3), or ``table`` is broken (T20 on).
    """

    def __init__(self, x: mx.array, axes: str, table: mx.array | None = None):
        self._x, self._table = x, table
        heads, dim = x.shape[1], x.shape[3]
        z, self._mean = tc_blocks.centred(x)
        self.constant = not z.any()
        self._given = None
        if table is not None:
            self._given = tc_basis.load(tc_basis.raw(table), heads, dim, x.shape[0] * x.shape[2])
        self._unit = tc_blocks.deviation(z) if table is None else 1.0
        if self._given is None:
            self._axes = tc_basis.candidates(z, heads, axes)
            self._spectra = [np.concatenate(a.variance) for a in self._axes]
        else:
            self._spectra = [tc_basis.projected(z, self._given)]
        top = max(float(spectrum.max(initial=0)) for spectrum in self._spectra)
        self._empty = EMPTY * top**0.5 / self._unit

    def estimate(self, step: float) -> float:
        """Estimate the bits that a step takes, from the variances alone."""
        step *= self._unit
        if self._given is not None:
            return self._rate(self._spectra[0], step)
        return min(self._cost(i, step) for i in range(len(self._axes)))

    def code(self, step: float) -> Coded:
        """Encode the tensor: all parts.

        Raises:
            CodecError: The integers do not fit (T4).
        """
        coded = self._code(step)
        for _ in range(TRIES):
            if self.constant or self.enough(coded):
                break
            coded = self._code(min(coded.step, self._empty) * FINER)
        return coded

    def enough(self, coded: Coded) -> bool:
        """Return whether a reader accepts so few bytes for the tensor (H10)."""
        own = coded.nbytes - coded.parts["basis"].nbytes
        return own * MAX_EXPANSION >= self._x.size

    @property
    def external_nbytes(self) -> int:
        """Return the bytes of the part that is in another file."""
        return 0 if self._table is None else self._table.nbytes

    def _code(self, step: float) -> Coded:
        scaled = step * self._unit
        basis = self._basis(scaled)
        parts = self._quantized(self._x, basis, scaled)
        parts["mean"] = mx.array(self._mean.reshape(self._x.shape[1], -1))
        parts["basis"] = self._stored(basis)
        return Coded(parts, step)

    def _quantized(self, x: mx.array, basis: Basis | None, step: float) -> Parts:
        z = tc_blocks.flat(x) - self._mean.astype(np.float32)
        return tc_blocks.quantize(z, basis, x.shape[1], step)

    def _basis(self, step: float) -> Basis | None:
        return self._given or self._fit(step, self._tokens)

    def _stored(self, basis: Basis | None) -> mx.array:
        if self._table is not None:
            return self._table
        return mx.zeros((0,), mx.uint8) if basis is None else tc_basis.array(basis)

    def _fit(self, step: float, tokens: int) -> Basis | None:
        """Fit axes of the cheapest kind; ``None`` for the channels."""
        best = min(range(len(self._axes)), key=lambda i: self._cost(i, step))
        return tc_basis.fit(self._axes[best], step, tokens) if self._axes[best].rows else None

    def _cost(self, index: int, step: float) -> float:
        """Estimate the bits of integers and rows on one kind of axes."""
        axes, spectrum = self._axes[index], self._spectra[index]
        if not axes.rows:
            return self._rate(spectrum, step)
        tokens, columns = self._tokens, axes.rows[0].shape[-1]
        paying = spectrum[tc_basis.worth(spectrum, step, tokens, columns)]
        rows = float(tc_basis.row_bits(paying, step, columns).sum())
        return self._rate(paying, step) + rows

    def _rate(self, variance: F64, step: float) -> float:
        return self._tokens * float(entropy(np.sqrt(variance) / step).sum())

    @property
    def _tokens(self) -> int:
        return self._x.shape[0] * self._x.shape[2]


def entropy(deviation: F64) -> F64:
    """Return the bits of a Laplacian variable of these deviations, rounded to integers."""
    decay = np.sqrt(2) / np.maximum(deviation, 1e-3)
    zero, more = -np.expm1(-decay / 2), np.exp(-decay)
    return np.asarray(binary(zero) + (1 - zero) * (1 + binary(more) / (1 - more)))


def binary(p: F64) -> F64:
    """Return the entropy of a bit that is 1 with probability ``p``."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.asarray(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def solve(
    estimate: Callable[[float], float],
    trial: Callable[[float], tuple[float, list[Coded]]],
    target: float,
) -> list[Coded]:
    """Search the finest step that stays under ``target`` bits, within ``SLACK``.

    Args:
        estimate: Bits of a step, falling, cheap and not quite right.
        trial: Bits of a step, and what it gave.
        target: Bits.

    The estimate is off by much the same factor at all steps near: two or three trials do.
    """
    low, high = log2(FINEST), log2(COARSEST)
    ratio, best, fits = 1.0, None, False
    for _ in range(TRIALS):
        at = _invert(estimate, target * (1 - SLACK / 2) / ratio)
        at = at if low < at < high else (low + high) / 2
        bits, coded = trial(2.0**at)
        if bits <= target or not fits:
            best, fits = coded, bits <= target
        if target * (1 - SLACK) <= bits <= target:
            break
        low, high = (low, at) if bits <= target else (at, high)
        ratio = bits / max(estimate(2.0**at), 1.0)
    assert best is not None  # there was a trial
    return best


def _invert(estimate: Callable[[float], float], bits: float) -> float:
    """Return log2 of the step that takes ``bits``."""
    low, high = log2(FINEST), log2(COARSEST)
    for _ in range(14):  # to a thousandth of an octave
        middle = (low + high) / 2
        low, high = (low, middle) if estimate(2.0**middle) <= bits else (middle, high)
    return high
