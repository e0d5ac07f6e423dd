"""Allocate bits across tensors in ``tc``, and learn bases for other texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import mlx.core as mx
import numpy as np

from vkv.codecs.protocol import Parts, Piece
from vkv.codecs.tc import basis as tc_basis
from vkv.codecs.tc.basis import F32, F64, Basis
from vkv.codecs.tc.blocks import centred, deviation
from vkv.codecs.tc.coder import Coded, Coder, solve
from vkv.errors import CodecError

#: Part of a metric that is made even: fit to few tokens, its small axes are noise.
EVEN = 0.5
#: Part of the bits that header, sinks and residual may take: with less left for the values, a cache
#: is worse than that of ``nsnquant:bits=2`` (86 tokens at 1 bit: KL .62 against .05).
MOST_FIXED = 0.5
#: Exponents of the weights below.
CONTENT_KEYS, CONTENT_VALUES, DEPTH, VALUES = 3.1, 2.5, 5.0, 2.5


def weights(pieces: Sequence[Piece]) -> list[float]:
    """Estimate what an error of one relative size costs in each tensor, from the caches alone.

    Errors count more in early layers, above all in their values; and more where keys
    vary much about their mean, since attention then looks at content. The exponents
    were fit on one model and halved; what a model itself says (``costs`` of
    ``train_basis``, or ``weights_of`` of ``plan``) is better.
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


@dataclass(frozen=True, slots=True)
class Rate:
    """Budget of a plan: ``bits`` per element of the whole file, or one ``step``.

    With ``force`` a plan is made even where the fixed parts leave too little.
    """

    bits: float
    step: float
    axes: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    """Result of a plan for one tensor: a step and parts, or a note on why it stays raw."""

    step: float
    parts: Parts | None
    note: str | None = None


def plan(
    pieces: Sequence[Piece],
    spans: Sequence[tuple[int, int]],
    rate: Rate,
    *,
    weights_of: Sequence[float] | None = None,
    overhead: int = 0,
) -> list[Allocated]:
    """Allocate bits across tensors, so that together they hurt the model least.

    Args:
        pieces: The tensors of all layers.
        spans: Of each, how many tokens stay raw in front, and how many are coded.
        rate: What was asked for, of keys.
        weights_of: Cost of an error of one relative size in each tensor; by default
            ``weights``. In a basis that knows the costs it is one for all.
        overhead: Bytes of the file that are not in the tensors.

    Each step is inverse to the root of a weight: then a bit buys as much in every tensor.
    """
    costs = np.log2(list(weights_of) if weights_of is not None else weights(pieces))
    steps = 2.0 ** (-0.5 * (costs - costs.mean()))
    steps[[p.basis is not None for p in pieces]] = 1.0
    coders = [
        Coder(p.x[..., lead : lead + body, :], rate.axes, p.basis)
        for p, (lead, body) in zip(pieces, spans, strict=True)
    ]
    if rate.bits == 0:
        share = sum(not p.keys for p in pieces) / max(len(pieces), 1)
        base = rate.step * 0.5**share  # the mean of keys and values without a plan
        coded = [c.code(_readable(base * s)) for c, s in zip(coders, steps, strict=True)]
    else:
        fixed = 8 * (overhead + sum(map(_raw, pieces, spans)))
        _check_share(pieces, rate, fixed)
        coded = _shared(coders, steps, rate.bits * sum(p.x.size for p in pieces), fixed)
    return [_allocated(*each) for each in zip(coders, coded, strict=True)]


def _check_share(pieces: Sequence[Piece], rate: Rate, fixed: int) -> None:
    """Refuse a rate of which the parts that no step changes take too much.

    Short segments behind a sequence's first ones are let pass: the rate is of the whole.
    """
    elements = sum(p.x.size for p in pieces)
    share = fixed / max(elements, 1)
    if rate.force or share <= MOST_FIXED * rate.bits or all(p.start for p in pieces):
        return
    tokens = max(p.x.shape[-2] for p in pieces)
    raise CodecError(
        f"asked for tc:bits={rate.bits:g}, refused: only {tokens} tokens: the header and the "
        f"tokens stored raw take {share:.2f} bits an element, expected at most "
        f"{MOST_FIXED * rate.bits:.2f}; ask for {share / MOST_FIXED:.1f} bits or more, use "
        "affine:bits=4, or save with force=True (--force)",
        at="tc.bits",
    )


def _shared(coders: Sequence[Coder], steps: F64, target: float, fixed: int) -> list[Coded]:
    """Encode all tensors with one step times ``steps``, in ``target`` bits, ``fixed`` ones in."""

    def estimate(step: float) -> float:
        return fixed + sum(c.estimate(step * s) for c, s in zip(coders, steps, strict=True))

    def trial(step: float) -> tuple[float, list[Coded]]:
        coded = [c.code(_readable(step * s)) for c, s in zip(coders, steps, strict=True)]
        external = sum(c.external_nbytes for c in coders)
        return fixed + 8 * (sum(c.nbytes for c in coded) - external), coded

    return solve(estimate, trial, target)


def _readable(step: float) -> float:
    """Round to four digits, which ``inspect`` can print."""
    return float(f"{np.clip(step, 1e-6, 1e6):.4g}")


def _allocated(coder: Coder, coded: Coded) -> Allocated:
    if coder.enough(coded):
        return Allocated(_readable(coded.step), coded.parts)
    note = "its values are all the same" if coder.constant else "next to nothing is left of it"
    return Allocated(_readable(coded.step), None, note)


def _raw(piece: Piece, span: tuple[int, int]) -> int:
    """Return the bytes of the tokens that are stored raw."""
    tokens = piece.x.shape[-2]
    return (tokens - span[1]) * (piece.x.nbytes // tokens)


def train_basis(moments: Sequence[F64], costs: Sequence[F64 | float]) -> list[mx.array]:
    """Train bases for other texts, one of each tensor.

    Args:
        moments: Second moments of each tensor's tokens about their mean, (H*D, H*D).
        costs: What a squared error costs in each: (H*D, H*D), the mean of ``g g^T`` over
            gradients ``g`` of the model's log-probabilities by the tokens; or, where
            these are not known, a number as ``weights`` gives. Of one kind for all.

    One ``step`` for all tensors is then right, and about the deviation of a mean one.
    """
    trained = [_train(m, cost) for m, cost in zip(moments, costs, strict=True)]
    # rows of a mean tensor have the size of its deviation
    norms = [np.log(np.sqrt(np.square(r).sum(-1)).mean() / d) for r, d in trained]
    common = np.exp(-np.mean(norms)).astype(np.float32)
    return [tc_basis.array(quantized(rows[None] * common)) for rows, _ in trained]


def _train(moments: F64, cost: F64 | float) -> tuple[F32, float]:
    """Train rows (n, n) for other tokens of the same tensor; return them and its deviation.

    Args:
        moments: Second moments (n, n) of tokens about their mean.
        cost: What a squared error costs, (n, n), positive semidefinite; or one number,
            of an error of the tensor's deviation.

    One step of every component then costs the same, in every tensor.
    """
    size = len(moments)
    deviation = float(np.sqrt(np.trace(moments) / size)) or 1.0
    if isinstance(cost, float):
        weight, root, inverse = cost / deviation**2, np.eye(size), np.eye(size)
    else:
        weight = float(np.trace(cost)) / size or 1e-300
        values, vectors = np.linalg.eigh((1 - EVEN) * cost / weight + EVEN * np.eye(size))
        root = (vectors * np.sqrt(values)) @ vectors.T
        inverse = (vectors / np.sqrt(values)) @ vectors.T
    _, axes = tc_basis.principal(root @ moments @ root)
    return (axes @ inverse / np.sqrt(weight)).astype(np.float32), deviation


def quantized(rows: F32) -> Basis:
    """Round rows (G, R, n) to 8 bits, with a scale a row."""
    scale = np.maximum(np.abs(rows).max(-1), np.float32(1e-30)) / np.float32(127)
    return Basis(np.rint(rows / scale[..., None]).astype(np.int16), scale)
