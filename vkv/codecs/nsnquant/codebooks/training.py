"""Training of codebooks on seeded normal samples: numpy alone, deterministic.

Lloyd's steps on fresh samples, with noise on the codewords that dies away (stochastic
relaxation), which ends in better minima than plain k-means. Samples and codewords are
on the grids of ``vkv.codecs.nsnquant.codebook_search``, so every sum is exact and every
machine gets the same codebook.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vkv.codecs.nsnquant.codebook_search import GRID, LIMIT, STEPS, best, extended, packed

__all__ = ["Spec", "train"]

#: Samples of one step for each row.
BATCH = 256
#: Standard deviation of the noise at the start; the exponent of its decay.
NOISE, DECAY = 0.15, 1.5
#: How much of the running means one step keeps: at the start, and how much more at the end.
KEEP, MORE = 0.7, 0.285

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spec:
    """Say what a codebook is made from.

    Args:
        magnitude: For absolute values; the signs are stored apart.
        cosine: Rows of norm sqrt(dim), trained on samples of that norm.
        size: Rows.
        dim: Columns.
        seed: Of the samples.
    """

    magnitude: bool
    cosine: bool
    size: int = 256
    dim: int = 8
    seed: int = 1234

    @property
    def file(self) -> str:
        """Name of the shipped file: F16, little-endian, row after row."""
        kind = f"{'magnitude' if self.magnitude else 'signed'}-{'cosine' if self.cosine else 'mse'}"
        return f"{kind}-{self.size}x{self.dim}-{self.seed}.f16"


def train(spec: Spec, steps: int) -> npt.NDArray[np.float16]:
    """Train a codebook, F16 ``(size, dim)``, of multiples of 1/256 below 4."""
    rng = np.random.Generator(np.random.PCG64(spec.seed))
    rows = _formed(rng.standard_normal((spec.size, spec.dim)), spec)
    sums, counts = np.zeros_like(rows), np.zeros((spec.size, 1))
    for step in range(steps):
        done = step / steps
        noise = NOISE * (1 - done) ** DECAY * rng.standard_normal(rows.shape)
        batch = _formed(rng.standard_normal((BATCH * spec.size, spec.dim)), spec)
        batch = np.round(batch * STEPS)
        noisy = packed(_gridded(_formed(rows + noise, spec)), cosine=spec.cosine)
        won = best(extended(batch), noisy)
        keep = KEEP + MORE * done
        sums = keep * sums + _sums(batch, won, spec.size) / STEPS
        counts = keep * counts + np.bincount(won, minlength=spec.size)[:, None]
        # The mean of a row that wins nothing fades to zero, where samples are dense.
        rows = _formed(sums / np.maximum(counts, 1e-9), spec)
    return _gridded(rows).astype("<f2")


def _formed(x: Floats, spec: Spec) -> Floats:
    x = np.abs(x) if spec.magnitude else x
    if not spec.cosine:
        return x
    norm = np.sqrt((x * x).sum(1, keepdims=True))
    scaled: Floats = x * (np.sqrt(spec.dim) / np.maximum(norm, 1e-9))
    return scaled


def _gridded(rows: Floats) -> Floats:
    edge = LIMIT - 1 / GRID
    gridded: Floats = np.clip(np.round(rows * GRID) / GRID, -edge, edge)
    return gridded


def _sums(batch: Floats, won: npt.NDArray[np.uint8], size: int) -> Floats:
    """Return the sum of the samples that each row won."""
    columns = [np.bincount(won, weights=column, minlength=size) for column in batch.T]
    sums: Floats = np.stack(columns, axis=1)
    return sums
