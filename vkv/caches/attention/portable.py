"""Attend to codes with plain MLX operations, on any device.

Codes of ``affine`` that hold the rope go to ``mx.quantized_matmul`` as they are. Others are
decoded some tokens at a time, so that the memory needed does not grow with the past.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

from vkv.caches.attention.past import Past
from vkv.caches.rope import rotate
from vkv.codecs.affine import Affine
from vkv.codecs.kernels.device import on_cpu, on_cuda
from vkv.codecs.nsnquant.codec import NSNQuant
from vkv.codecs.protocol import Parts

__all__ = ["attend", "refuses"]

#: Elements of keys, or of values, that are decoded at a time.
STEP = 1 << 23


def refuses(keys: Past, values: Past) -> str | None:
    """Say why decoding all of it is the better way, or ``None``.

    Args:
        keys, values: Of one layer.
    """
    for past in (keys, values):
        if not isinstance(past.codec, Affine | NSNQuant):
            return f"{past.codec.id} cannot be decoded from the middle"
    if (keys.head_tokens, keys.tokens) != (values.head_tokens, values.tokens):
        return "keys and values are coded over different tokens"
    return None


class _Sums(NamedTuple):
    """Part of a softmax, for queries ``(B, H, R, L, 1)`` in float32.

    Attributes:
        top: Maximum of the scores.
        total: Sum of the weights, relative to ``top``.
        out: Weighted values, ``(B, H, R, L, D)``.
    """

    top: mx.array
    total: mx.array
    out: mx.array


def attend(queries: mx.array, keys: Past, values: Past, scale: float, causal: bool) -> mx.array:
    """Attend to all tokens of a layer.

    Args:
        queries: ``(B, Hq, L, D)``, of the last ``L`` tokens.
        keys, values: Of ``H`` heads, a divisor of ``Hq``.
        scale: Multiplies scores.
        causal: Each query sees the tokens up to its own.

    Returns:
        ``(B, Hq, L, Dv)`` in the dtype of ``queries``.
    """
    batch, heads, length, _ = queries.shape
    kv_heads = keys.tail.shape[1]
    # A CPU multiplies half precision many times slower, and rounds each sum.
    q = queries.astype(mx.float32) if on_cpu() else queries
    q = (q * scale).reshape(batch, kv_heads, heads // kv_heads * length, -1)
    exact = _exact(q, keys, values, length if causal else 1)
    if _matmul(keys) and _matmul(values):
        out = _at_once(q, keys, values, exact)
    else:
        out = _in_steps(q, keys, values, exact)
    return out.reshape(batch, heads, length, -1).astype(queries.dtype)


def _matmul(past: Past) -> bool:
    return isinstance(past.codec, Affine) and past.rope is None and not on_cuda()


def _exact(q: mx.array, keys: Past, values: Past, length: int) -> tuple[mx.array, mx.array]:
    """Scores of the exact tokens ``(B, H, R * L, n)``, and their values."""
    ends = [past.tail if past.head is None else mx.concatenate([past.head, past.tail], axis=2)
            for past in (keys, values)]  # fmt: skip
    scores = q @ ends[0].swapaxes(-1, -2)
    if length > 1:
        count = ends[0].shape[2]
        newest = count - length + mx.arange(q.shape[2]) % length
        seen = mx.arange(count) <= newest[:, None]
        scores = mx.where(seen, scores, mx.finfo(scores.dtype).min)
    return scores, ends[1]


def _at_once(q: mx.array, keys: Past, values: Past, exact: tuple[mx.array, mx.array]) -> mx.array:
    """Score all codes by one product, and weigh them by another."""
    coded = _product(q, keys, True)
    scores = mx.softmax(mx.concatenate([coded, exact[0]], axis=-1), axis=-1, precise=True)
    weights = scores[..., : keys.tokens], scores[..., keys.tokens :]
    return _product(weights[0], values, False) + weights[1] @ exact[1]


def _product(x: mx.array, past: Past, transpose: bool) -> mx.array:
    assert isinstance(past.codec, Affine)
    codes, scales, biases = (past.parts[name] for name in ("codes", "scales", "biases"))
    return mx.quantized_matmul(
        x, codes, scales, biases, transpose, past.codec.group, past.codec.bits
    )


def _in_steps(q: mx.array, keys: Past, values: Past, exact: tuple[mx.array, mx.array]) -> mx.array:
    """Keep a running softmax over stretches that are decoded one after the other."""
    sums, step = _weighed(*exact), _step(keys, values)
    for k, v in zip(_decoded(keys, q.dtype, step), _decoded(values, q.dtype, step), strict=True):
        sums = _added(sums, _weighed(q @ k.swapaxes(-1, -2), v))
        mx.async_eval(sums.out)  # type: ignore[no-untyped-call]  # lets the stretch go
    return sums.out / sums.total


def _weighed(scores: mx.array, values: mx.array) -> _Sums:
    top = scores.max(axis=-1, keepdims=True).astype(mx.float32)
    weights = mx.exp(scores.astype(mx.float32) - top)
    out = (weights.astype(values.dtype) @ values).astype(mx.float32)
    return _Sums(top, weights.sum(axis=-1, keepdims=True), out)


def _added(a: _Sums, b: _Sums) -> _Sums:
    top = mx.maximum(a.top, b.top)
    one, two = mx.exp(a.top - top), mx.exp(b.top - top)
    return _Sums(top, a.total * one + b.total * two, a.out * one + b.out * two)


def _step(keys: Past, values: Past) -> int:
    """Tokens of a stretch: whole windows of both."""
    window = math.lcm(keys.codec.window, values.codec.window)
    batch, heads, _, dim = keys.tail.shape
    return max(1, STEP // (batch * heads * dim * window)) * window


def _decoded(past: Past, dtype: mx.Dtype, step: int) -> Iterator[mx.array]:
    """Decode stretches of ``step`` tokens; keys get their rope back."""
    batch, heads, _, dim = past.tail.shape
    for start in range(0, past.tokens, step):
        stop = min(start + step, past.tokens)
        shape = (batch, heads, stop - start, dim)
        x = past.codec.decode(_cut(past, start, stop), shape, dtype)
        rope = past.rope
        yield x if rope is None else rotate(x, rope, past.head_tokens + start, dtype=dtype)


def _cut(past: Past, start: int, stop: int) -> Parts:
    if isinstance(past.codec, NSNQuant):
        window = past.codec.window
        return past.codec.select(past.parts, start // window, stop // window)
    return {name: part[:, :, start:stop] for name, part in past.parts.items()}
