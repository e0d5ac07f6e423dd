"""Normalize, shift, normalize: the maths of ``nsnquant`` on whole windows.

Every sum runs inside one window and in an order that does not depend on how many
windows one call carries, so that windows encode to the same bits in any split.
Shapes: M windows of W tokens of D channels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from vkv.codecs.bits import pack, unpack, words
from vkv.codecs.nsnquant import hadamard
from vkv.codecs.nsnquant.codebook_search import Search
from vkv.codecs.protocol import Layout, Parts
from vkv.errors import CodecError
from vkv.format.dtypes import F16_MAX

__all__ = [
    "GROUP",
    "code",
    "decode",
    "dequantize",
    "metadata",
    "prepare",
    "quantize",
    "rms",
    "total",
]

#: Channels of ``o`` that share a scale and a minimum.
GROUP = 32
#: The highest 4-bit code.
TOP = 15
#: The most that a token's length may exceed its ``s1``, so that ``s2`` fits F16.
SPREAD = 1024
#: Tokens weigh in a fit with at most this many times the median length.
CAP = 8.0


def total(x: mx.array, axis: int) -> mx.array:
    """Sum along ``axis``, kept as length 1, by halves.

    ``mx.sum`` on a GPU picks its order by the sizes of the other axes.
    """
    axis %= x.ndim
    before = (slice(None),) * axis
    while (n := x.shape[axis]) > 1:
        half = n // 2
        y = x[(*before, slice(half))] + x[(*before, slice(half, 2 * half))]
        x = y if n % 2 == 0 else mx.concatenate([y, x[(*before, slice(n - 1, n))]], axis=axis)
    return x


def rms(x: mx.array) -> mx.array:
    """Compute ``|x| / sqrt(D)`` along the last axis, kept as length 1."""
    return mx.sqrt(total(x * x, -1) / x.shape[-1])


def quantize(x: mx.array, *, avoid_zero: bool = False) -> tuple[mx.array, mx.array]:
    """Quantize each row to 4-bit codes, with one scale and one minimum a row.

    Args:
        x: F32 of shape ``(..., N)``.
        avoid_zero: Move the minimum so that no code comes nearer to 0 than scale / 8.

    Returns:
        Codes 0 to 15, F32 of shape ``(..., N)``; F16 ``(..., 2)``: scale, minimum.
    """
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = ((high - low) / TOP).astype(mx.float16).astype(mx.float32)
    safe = mx.where(scale > 0, scale, 1)
    if avoid_zero:
        nearest = low - scale * mx.round(low / safe)
        move = mx.where(nearest < 0, -scale, scale) / 8 - nearest
        low = mx.where((low < scale / 2) & (mx.abs(nearest) < scale / 8), low + move, low)
    ranges = mx.concatenate([scale, low], axis=-1).astype(mx.float16)
    codes = mx.round((x - ranges[..., 1:].astype(mx.float32)) / safe)
    return mx.clip(codes, 0, TOP), ranges


def dequantize(codes: mx.array, ranges: mx.array) -> mx.array:
    """Compute ``scale * code + minimum``, F32."""
    wide = ranges.astype(mx.float32)
    return wide[..., :1] * codes.astype(mx.float32) + wide[..., 1:]


class Prepared(NamedTuple):
    """Windows on their way: rotated, of unit variance, not yet coded."""

    norms: mx.array  #: ``(M, W, 1)``
    s2: mx.array  #: ``(M, W, 1)``
    z: mx.array  #: ``(M, W, D)``; without signs, if they are apart
    parts: Parts


def prepare(x: mx.array, *, signs: bool, fine: bool, fit: str) -> Prepared:
    """Do all of the encoding before the search, lazily.

    Args:
        x: Windows ``(M, W, D)`` of a float dtype.
        signs: Signs are stored apart.
        fine: ``s1`` and ``o`` in 16 bits, not 4.
        fit: ``"nsn"`` or ``"project"``.
    """
    x = x.astype(mx.float32)
    norms = rms(x)
    weight = _weight(norms) if fit == "project" else mx.ones_like(norms)
    scale = _projection(x, norms, weight) if fit == "project" else norms
    s1, scale_parts = _fine_scale(scale, norms) if fine else _coarse_scale(scale, norms, fit)
    o, shift_parts = _shift(x, s1, weight, fit, fine)
    x = x * _reciprocal(s1) - o
    s2 = rms(x)
    z = hadamard.inverse(x * _reciprocal(s2))
    parts = scale_parts | shift_parts | ({"signs": _sign_bits(z)} if signs else {})
    return Prepared(norms, s2, mx.abs(z) if signs else z, parts)


def code(ready: Prepared, codebook: mx.array, search: Search, fold: str) -> Parts:
    """Search codewords and do the rest of the encoding.

    Args:
        ready: What ``prepare`` made of the windows.
        codebook: F32 ``(K, V)``.
        search: Of the same codebook.
        fold: ``"least"``, ``"orthogonal"`` or ``"norm"``.

    Returns:
        Parts with a leading axis M.

    Raises:
        CodecError: Values are not finite, or too large for F16 scales (N3).
    """
    _check(ready.norms)
    z = ready.z
    indices = search(z.reshape(-1, codebook.shape[1])).reshape(*z.shape[:2], -1)
    s2 = ready.s2 * _fold(z, codebook[indices].reshape(z.shape), fold)
    s2 = mx.minimum(s2, F16_MAX).squeeze(-1).astype(mx.float16)
    return ready.parts | {"indices": indices, "s2": s2}


def _check(norms: mx.array) -> None:
    if not (norms <= F16_MAX).all():  # false for NaN, too
        raise CodecError(
            f"a token has |x|/sqrt(D) {norms.max().item()}, expected at most {F16_MAX}",
            rule="N3",
            at="nsnquant",
        )


def _weight(norms: mx.array) -> mx.array:
    """Return the factor that shortens tokens longer than ``CAP`` medians of their window to it.

    So that one giant token (an attention sink) does not bend the fit of the others.
    """
    median = mx.sort(norms, axis=1)[:, norms.shape[1] // 2, None]
    cap = mx.maximum(CAP * median, norms.max(1, keepdims=True) / SPREAD)
    return mx.minimum(1, cap * _reciprocal(norms))


def _projection(x: mx.array, norms: mx.array, weight: mx.array) -> mx.array:
    """Project each token on the window's mean direction, signed; where weak, take its length."""
    mean = total(x * _reciprocal(norms), 1)
    length = rms(mean)
    projected = total(x * mean, -1) * _reciprocal(length * x.shape[-1]) * weight
    strong = mx.abs(projected).max(1, keepdims=True) * 128 >= norms.max(1, keepdims=True)
    return mx.where(strong, projected, norms * weight)


def _fine_scale(scale: mx.array, norms: mx.array) -> tuple[mx.array, Parts]:
    """Round ``s1`` to 16 bits: return it as decoded, F32 ``(M, W, 1)``, and its parts."""
    floor = mx.where(scale < 0, -norms, norms) / SPREAD
    s1 = mx.where(mx.abs(scale) < mx.abs(floor), floor, scale).astype(mx.float16)
    return s1.astype(mx.float32), {"s1": s1.squeeze(-1)}


def _coarse_scale(scale: mx.array, norms: mx.array, fit: str) -> tuple[mx.array, Parts]:
    """Return the same in 4 bits. No token gets a scale that is nothing beside its length."""
    scale, norms = scale.squeeze(-1), norms.squeeze(-1)
    codes, ranges = quantize(scale, avoid_zero=fit == "project")
    if fit == "nsn":
        codes = mx.minimum(codes + (dequantize(codes, ranges) * 16 < norms), TOP)
    return dequantize(codes, ranges)[..., None], {"s1": pack(codes, 4), "s1_range": ranges}


def _shift(
    x: mx.array, s1: mx.array, weight: mx.array, fit: str, fine: bool
) -> tuple[mx.array, Parts]:
    """Round ``o``: return it as decoded, F32 ``(M, 1, D)``, and its parts."""
    if fit == "project":
        o = total(x * (s1 * weight), 1) * _reciprocal(total(s1 * s1, 1))
    else:
        o = total(x * _reciprocal(s1), 1) / x.shape[1]
    if fine:
        o = o.astype(mx.float16)
        return o.astype(mx.float32), {"o": o.squeeze(1)}
    codes, ranges = quantize(o.reshape(len(o), -1, GROUP))
    parts = {"o": pack(codes.reshape(len(o), -1), 4), "o_range": ranges}
    return dequantize(codes, ranges).reshape(o.shape), parts


def _reciprocal(scale: mx.array) -> mx.array:
    """Compute ``1 / scale``, and 0 for 0: a token without length has no direction either."""
    zero = scale == 0
    return mx.where(zero, 0, 1 / mx.where(zero, 1, scale))


def _sign_bits(z: mx.array) -> mx.array:
    """Pack signs, U8 ``(M, W, D/8)``: bit ``d % 8`` of byte ``d // 8`` is set if negative."""
    stream = pack((z < 0).reshape(-1), 1).view(mx.uint8)
    return stream[: z.size // 8].reshape(*z.shape[:2], -1)


def _fold(z: mx.array, code: mx.array, fold: str) -> mx.array:
    """Return the factor on ``s2`` that corrects for the chosen codewords, ``(M, W, 1)``."""
    dim = z.shape[-1]  # the squared length of every z but of zeros, whose s2 is 0
    if fold == "norm":
        return mx.sqrt(dim / total(code * code, -1))
    along = total(z * code, -1)
    along = mx.where(along > 0, along, dim)
    return dim / along if fold == "orthogonal" else along / total(code * code, -1)


def metadata_layout(
    bits: int, window: int, rows: tuple[int, ...], windows: tuple[int, ...], dim: int
) -> Layout:
    """Return dtype and shape of ``s1`` and ``o`` in 4 or 16 bits, of ``rows`` in ``windows``."""
    if bits == 16:
        return {"s1": ("F16", rows), "o": ("F16", (*windows, dim))}
    return {
        "s1": ("U32", (*windows, words(window, 4))),
        "s1_range": ("F16", (*windows, 2)),
        "o": ("U32", (*windows, dim // 8)),
        "o_range": ("F16", (*windows, dim // GROUP, 2)),
    }


def metadata(parts: Parts, *, window: int, dim: int) -> tuple[mx.array, mx.array, mx.array]:
    """Decode ``s1`` and ``s2``, F32 ``(M, W)``, and ``o``, F32 ``(M, D)``, of parts ``(M, -1)``."""
    s1, s2, o = (parts[name] for name in ("s1", "s2", "o"))
    if "s1_range" in parts:
        s1 = dequantize(unpack(s1, 4, window), parts["s1_range"])
        groups = unpack(o, 4, dim).reshape(len(o), -1, GROUP)
        o = dequantize(groups, parts["o_range"].reshape(len(o), -1, 2)).reshape(-1, dim)
    return s1.astype(mx.float32), s2.astype(mx.float32), o.astype(mx.float32)


def decode(parts: Parts, *, codebook: mx.array, window: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """Decode parts of shape ``(M, -1)`` to windows ``(M, W, D)``, in F32 until the last cast."""
    code = codebook[parts["indices"]].reshape(-1, window, dim)
    if "signs" in parts:
        code = code * _signs()[parts["signs"]].reshape(code.shape)
    s1, s2, o = metadata(parts, window=window, dim=dim)
    x = s1[..., None] * (s2[..., None] * hadamard.forward(code) + o[:, None])
    return (mx.clip(x, -F16_MAX, F16_MAX) if dtype == mx.float16 else x).astype(dtype)


@cache
def _signs() -> mx.array:
    """Return the eight factors of each sign byte, F32 ``(256, 8)``: -1 where the bit is set."""
    signs = 1 - 2 * ((mx.arange(256)[:, None] >> mx.arange(8)) & 1).astype(mx.float32)
    mx.eval(signs)  # in this thread, whichever uses it later
    return signs
