"""Measure how far a model's next-token distributions move with another cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class Quality:
    """Against the raw cache, over the test tokens.

    Attributes:
        kl: Mean of KL(raw || codec) of the next-token distribution, nats.
        kl_p99: Its 99th percentile over the tokens.
        top1: Share of tokens whose most likely successor is the same.
        perplexity: Of the test text itself.
    """

    kl: float
    kl_p99: float
    top1: float
    perplexity: float


def log_probs(model: Any, cache: Sequence[Any], tokens: Sequence[int]) -> mx.array:
    """Return log-probabilities ``(N, vocabulary)``, float32, after each of ``N`` tokens.

    The cache grows by the tokens: pass a copy.
    """
    logits: mx.array = model(mx.array([list(tokens)]), cache=list(cache))[0].astype(mx.float32)
    out: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(out)
    return out


def compare(reference: mx.array, other: mx.array, tokens: Sequence[int]) -> Quality:
    """Compare ``other`` with ``reference``, both from ``log_probs`` over ``tokens``."""
    kl = np.array((mx.exp(reference) * (reference - other)).sum(axis=-1), dtype=np.float64)
    kl = np.maximum(kl, 0.0)  # rounding makes a sum of zeros slightly negative
    same = (mx.argmax(reference, axis=-1) == mx.argmax(other, axis=-1)).mean()
    following = mx.array(list(tokens[1:]))[:, None]
    nll = -mx.take_along_axis(other[:-1], following, axis=-1).mean()
    return Quality(
        kl=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)),
        top1=_float(same),
        perplexity=_float(mx.exp(nll)),
    )


def relative_error(x: mx.array, y: mx.array, *, centred: bool) -> tuple[float, float]:
    """Return the squared error of ``y`` and the power of ``x``, ``(B, H, T, D)``.

    Args:
        x: The raw tensor.
        y: What came back.
        centred: Power about the channel mean over ``T`` (keys), not about zero.
    """
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    base = x - x.mean(axis=2, keepdims=True) if centred else x
    return _float(mx.square(x - y).sum()), _float(mx.square(base).sum())


def _float(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]  # never complex
