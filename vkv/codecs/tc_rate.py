"""Rates of ``tc``: what a step costs, which axes are cheapest, and who gets how many bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs import tc_basis
from vkv.codecs.base import Piece
from vkv.codecs.tc_basis import F32, F64, Basis
from vkv.codecs.tc_blocks import centred, deviation

if TYPE_CHECKING:
    from vkv.codecs.tc import Tc

#: Steps between which a rate is searched, in deviations; past 2 nothing is left of a tensor.
FINEST, COARSEST = 2.0**-10, 2.0
#: How far below the target a search may end, and its most trials.
SLACK, TRIALS = 0.005, 12
#: Exponents of the weights below.
CONTENT_KEYS, CONTENT_VALUES, DEPTH, VALUES = 3.1, 2.5, 5.0, 2.5


def entropy(deviation: F64) -> F64:
    """Bits of a Laplacian variable of these deviations, rounded to integers."""
    decay = np.sqrt(2) / np.maximum(deviation, 1e-3)
    zero, more = -np.expm1(-decay / 2), np.exp(-decay)
    return np.asarray(binary(zero) + (1 - zero) * (1 + binary(more) / (1 - more)))


def binary(p: F64) -> F64:
    """Entropy of a bit that is 1 with probability ``p``."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.asarray(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def basis_for(z: F32, heads: int, axes: str, step: float) -> Basis | None:
    """Axes of the kind asked for, or the cheapest (``auto``), for tokens (N, n)."""
    kinds = [axes] if axes != "auto" else ["none", "head", "joint"]
    best: tuple[float, Basis | None] | None = None
    for kind in kinds:
        pools = tc_basis.pools(z, heads, kind)
        if axes == "auto" and kind != "none" and pools.shape[-1] > tc_basis.MAX_COMPONENTS:
            continue
        bits, basis = _estimate(pools, None if kind == "none" else step, step)
        if best is None or bits < best[0]:
            best = bits, basis
    assert best is not None  # "none" is always there
    return best[1]


def _estimate(pools: F32, fit: float | None, step: float) -> tuple[float, Basis | None]:
    tokens = pools.shape[1]
    if fit is None:
        return tokens * float(entropy(np.sqrt(np.square(pools[0]).mean(0)) / step).sum()), None
    basis = tc_basis.fit(pools, step, tokens)
    bits = 0.0
    for z, rows in zip(pools, basis.rows, strict=True):
        variance = np.square(z @ tc_basis.analysis(rows)).mean(0, dtype=np.float64)
        kept = variance > 0
        bits += tokens * float(entropy(np.sqrt(variance[kept]) / step).sum())
        bits += float(tc_basis.row_bits(variance[kept], step, rows.shape[-1]).sum())
    return bits, basis


def solve(spent: Callable[[float], float], target: float) -> float:
    """The finest step for which ``spent`` (bits, falling) stays under ``target``, nearly."""
    low, high = log2(FINEST), log2(COARSEST)
    at = -1.0
    for _ in range(TRIALS):
        bits = spent(2.0**at)
        if bits <= target:
            high = at
            if bits >= target * (1 - SLACK):
                break
        else:
            low = at
        # a bit less for a step twice as large, less than that at low rates
        guess = at + (bits - target) * 1.1
        at = guess if low < guess < high else (low + high) / 2
    return float(2.0**high)


def weights(pieces: Sequence[Piece]) -> list[float]:
    """What an error of one relative size costs in each tensor, seen from the caches alone.

    Errors count more in early layers, above all in their values; and more where keys
    vary much about their mean, since attention then looks at content. The exponents
    were fit on one model and halved; what a model itself says (``metrics`` of
    ``train_basis``, or ``weights`` of ``plan``) is better.
    """
    content = {p.layer: _content(p.x) for p in pieces if p.keys}
    last = max((p.layer for p in pieces), default=0) or 1
    out = []
    for p in pieces:
        m = content.get(p.layer, 1.0)
        power = (
            -CONTENT_KEYS * m if p.keys else VALUES - CONTENT_VALUES * m - DEPTH * p.layer / last
        )
        out.append(2.0**power)
    return out


def _content(keys: mx.array) -> float:
    z, mean = centred(keys)
    size = float(np.sqrt(np.mean(np.square(mean.astype(np.float64)))))
    return float(np.clip(log2(max(size / deviation(z), 1e-9)), -1, 2))


def plan(
    pieces: Sequence[Piece],
    codec: Tc,
    *,
    weights_of: Sequence[float] | None = None,
    overhead: int = 0,
) -> list[Tc]:
    """A codec for each tensor, so that together they hurt the model least.

    Args:
        pieces: The tensors of all layers.
        codec: What was asked for, of keys: ``bits`` over everything, or ``step``.
        weights_of: Cost of an error of one relative size in each tensor; by default
            ``weights``.
        overhead: Bytes of the file that are not in the tensors.

    Each step is inverse to the root of a weight: then a bit buys as much in every tensor.
    """
    found = np.log2(list(weights_of) if weights_of is not None else weights(pieces))
    steps = 2.0 ** (-0.5 * (found - found.mean()))

    def at(step: float) -> list[Tc]:
        # four digits are enough, and can be read in what ``inspect`` prints
        sizes = [float(f"{np.clip(step * s, 1e-6, 1e6):.4g}") for s in steps]
        return [replace(codec, bits=0.0, step=s, pre_rope=codec.pre_rope and p.keys)
                for s, p in zip(sizes, pieces, strict=True)]  # fmt: skip

    if codec.bits == 0:
        share = sum(not p.keys for p in pieces) / max(len(pieces), 1)
        return at(codec.step * 0.5**share)  # the mean of keys and values without a plan
    total = sum(p.x.size for p in pieces)

    def spent(step: float) -> float:
        used = sum(_stored(c, p) for c, p in zip(at(step), pieces, strict=True))
        return 8 * (used + overhead) / total

    return at(solve(spent, codec.bits))


def _stored(codec: Tc, piece: Piece) -> int:
    """Bytes of a tensor with its raw tokens."""
    x, tokens = piece.x, piece.x.shape[-2]
    lead, body = codec.span(tokens, piece.start)
    raw = (tokens - body) * (x.nbytes // tokens)
    if not body:
        return raw
    return raw + sum(p.nbytes for p in codec.encode(x[..., lead : lead + body, :]).values())


def train_basis(
    samples: Sequence[tuple[Piece, ...]],
    metrics: Sequence[npt.NDArray[np.float64]] | None = None,
    weights_of: Sequence[float] | None = None,
) -> list[mx.array]:
    """Bases for other texts: of each tensor, from its caches of several texts.

    Args:
        samples: For each tensor, its pieces, without sinks.
        metrics: For each tensor, what a squared error costs, (H*D, H*D): the mean of
            ``g g^T`` over gradients ``g`` of the model's log-probabilities by its tokens.
        weights_of: Without metrics: as in ``plan``.

    One ``step`` for all tensors is then right, and about the deviation of a mean one.
    """
    firsts = [pieces[0] for pieces in samples]
    given = list(weights_of) if weights_of is not None else weights(firsts)
    trained = []
    for i, pieces in enumerate(samples):
        z = np.concatenate([centred(p.x)[0] for p in pieces])
        weight = given[i] / deviation(z) ** 2
        trained.append(tc_basis.train(z, None if metrics is None else metrics[i], weight))
    # rows of a mean tensor have the size of its deviation
    norms = [np.log(np.sqrt(np.square(r).sum(-1)).mean() / d) for r, d in trained]
    common = np.exp(-np.mean(norms)).astype(np.float32)
    return [tc_basis.array(tc_basis.quantized(rows[None] * common)) for rows, _ in trained]
