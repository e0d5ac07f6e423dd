"""Encode ``kvquant``: choose outliers, fit levels and scales, assign codes.

None of this is normative. It is NumPy, and goes head by head (keys) or a few tokens at
a time (values), so that what it touches stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkv.codecs.kvquant import levels as nuq
from vkv.codecs.kvquant import outliers
from vkv.codecs.kvquant.levels import OFFSET_STEPS, SCALE_BIAS
from vkv.format.dtypes import F16_MAX

__all__ = ["Coded", "Recipe", "by_channel", "by_token", "shared", "with_bounds", "with_levels"]

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]

#: Elements worked on at a time.
CHUNK = 1 << 18
#: Samples enough for one set of levels: the error of a larger sample's is within 0.1 %.
SAMPLES = 1 << 18
OFFSET_MAX = 127


class Recipe(NamedTuple):
    """Parameters of the codec that the encoder needs."""

    levels: int
    fraction: float
    centred: bool
    sweeps: int

    def count(self, size: int) -> int:
        """Return the number of outliers among ``size`` elements; never all."""
        return min(round(self.fraction * size), size - 1)

    def centre(self, x: Floats, axis: int) -> Floats:
        """Find what outliers are far from: the mean, or zero."""
        mean: Floats = x.mean(axis=axis, keepdims=True)
        return mean if self.centred else np.zeros_like(mean)


class Coded(NamedTuple):
    """``codes`` and outlier ``mask`` of shape ``(B, H, T, D)``; ``parts`` but for the list."""

    codes: Bytes
    mask: Mask
    parts: dict[str, NDArray[Any]]


def by_channel(x: Floats, recipe: Recipe, weights: Floats | None) -> Coded:
    """Fit levels and bounds per head and channel of ``x`` ``(B, H, T, D)``."""
    batch, heads, _, dim = x.shape
    codes, mask = np.empty(x.shape, np.uint8), np.empty(x.shape, np.bool_)
    levels = np.empty((batch, heads, dim, recipe.levels), np.float16)
    bounds = np.empty((batch, heads, dim, 2), np.float16)
    for at in np.ndindex(batch, heads):
        weight = None if weights is None else weights[at]
        levels[at], bounds[at], mask[at] = _fit_head(x[at], recipe, weight)
        codes[at] = nuq.nearest(x[at], levels[at].T)
    parts: dict[str, NDArray[Any]] = {"levels": levels}
    return Coded(codes, mask, parts | ({"bounds": bounds} if recipe.fraction else {}))


def _fit_head(x: Floats, recipe: Recipe, weights: Floats | None) -> tuple[Halves, Halves, Mask]:
    """Fit one head ``(T, D)``: levels ``(D, L)``, bounds ``(D, 2)``, outlier mask ``(T, D)``."""
    rows = np.ascontiguousarray(x.T)
    ordered, weights = _ordered(rows, None if weights is None else weights.T)
    count = recipe.count(rows.shape[1])
    first, last = outliers.dense_range(ordered, recipe.centre(rows, axis=1)[:, 0], count)
    levels = nuq.lloyd_max(ordered, recipe.levels, recipe.sweeps, first, last, weights)
    low, high = (np.take_along_axis(ordered, i[:, None], axis=1) for i in (first, last - 1))
    mask = outliers.exactly(rows < low, rows == low, first)
    mask |= outliers.exactly(rows > high, (rows == high) & ~mask, count - first)
    some = rows[:, :: max(1, rows.shape[1] // 1024)]
    bounds = _bounds(low, high, np.clip(some, low, high), recipe)
    return levels.astype(np.float16), bounds, mask.T


def _ordered(rows: Floats, weights: Floats | None) -> tuple[Floats, Floats | None]:
    """Sort rows ``(R, N)`` in ascending order, and their weights with them."""
    if weights is None:
        return np.sort(rows, axis=1), None
    order = np.argsort(rows, axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(weights, order, axis=1)


def _bounds(low: Floats, high: Floats, dense: Floats, recipe: Recipe) -> Halves:
    """Return bounds ``(D, 2)`` for later tokens.

    The extremes of few samples are too near: of 128 tokens, they call 4 % of later
    keys outliers instead of 1 %. So a bound is no nearer than where a normal
    distribution of the same mean and deviation leaves ``fraction`` outside.

    Args:
        low: ``(D, 1)`` least dense sample.
        high: ``(D, 1)`` greatest.
        dense: ``(D, N)`` some of the dense samples.
        recipe: As everywhere.
    """
    if not recipe.centred:
        high = np.maximum(-low, high)
        low = -high
    elif recipe.fraction:
        normal = NormalDist().inv_cdf(1 - recipe.fraction / 2)
        mean, reach = dense.mean(axis=1, keepdims=True), normal * dense.std(axis=1, keepdims=True)
        low, high = np.minimum(low, mean - reach), np.maximum(high, mean + reach)
    return np.concatenate([low, high], axis=1).clip(-F16_MAX, F16_MAX).astype(np.float16)


def with_bounds(x: Floats, levels: Halves, bounds: Halves | None) -> Coded:
    """Code ``x`` with the levels and bounds of an earlier segment."""
    codes, mask = np.empty(x.shape, np.uint8), np.zeros(x.shape, np.bool_)
    for at in np.ndindex(x.shape[:2]):
        codes[at] = nuq.nearest(x[at], levels[at].T)
        if bounds is not None:
            low, high = bounds[at].astype(np.float32).T
            mask[at] = (x[at] < low) | (x[at] > high)
    return Coded(codes, mask, {})


def _chunks(x: Floats) -> Iterator[tuple[int, slice]]:
    """Yield batch row and range of tokens of every piece of about ``CHUNK`` elements."""
    batch, heads, tokens, dim = x.shape
    step = max(1, CHUNK // (heads * dim))
    for row in range(batch):
        for start in range(0, tokens, step):
            yield row, slice(start, min(start + step, tokens))


def _farthest(x: Floats, recipe: Recipe) -> Mask:
    """Mark ``fraction`` of each token over all heads, ``(H, T, D)``."""
    heads, tokens, dim = x.shape
    count = recipe.count(heads * dim)
    if not count:
        return np.zeros(x.shape, np.bool_)
    far = np.abs(x - recipe.centre(x, axis=2)).transpose(1, 0, 2).reshape(tokens, heads * dim)
    least = np.partition(far, -count, axis=1)[:, -count, None]
    mask = outliers.exactly(far > least, far == least, count)
    return mask.reshape(tokens, heads, dim).transpose(1, 0, 2)


def by_token(x: Floats, recipe: Recipe, weights: Floats | None) -> Coded:
    """Fit levels per head and token of ``x`` ``(B, H, T, D)``."""
    codes, mask = np.empty(x.shape, np.uint8), np.empty(x.shape, np.bool_)
    levels = np.empty((*x.shape[:3], recipe.levels), np.float16)
    for row, span in _chunks(x):
        at = (row, slice(None), span)
        mask[at] = _farthest(x[at], recipe)
        rows, out = x[at].reshape(-1, x.shape[3]), mask[at].reshape(-1, x.shape[3])
        weight = None if weights is None else weights[at].reshape(rows.shape)
        fitted = _fit_rows(rows, out, recipe, weight)
        levels[at] = fitted.reshape(*x[at].shape[:2], -1)
        codes[at] = nuq.nearest(x[at], np.moveaxis(levels[at], 2, 0)[..., None])
    return Coded(codes, mask, {"levels": levels})


def _fit_rows(
    rows: Floats, out: Mask, recipe: Recipe, weights: Floats | None
) -> NDArray[np.float64]:
    """Fit levels ``(R, L)`` to rows ``(R, N)`` without the elements under ``out``."""
    dense = np.where(out, np.float32(2 * F16_MAX), rows)  # sorts to the end
    dense, weights = _ordered(dense, weights)
    last = (~out).sum(axis=1)
    dense[last == 0] = 0  # a row of outliers only: any levels do
    first = np.zeros_like(last)
    return nuq.lloyd_max(dense, recipe.levels, recipe.sweeps, first, last.clip(1), weights)


def shared(x: Floats, recipe: Recipe, weights: Floats | None) -> Coded:
    """Fit one set of levels for all of ``x`` ``(B, H, T, D)``; a token has scale and offset."""
    mask, parts = _scaled(x, recipe)
    levels = _fit_sample(x, mask, parts, recipe, weights)
    return Coded(_codes(x, parts, levels), mask, {**parts, "levels": levels})


def with_levels(x: Floats, recipe: Recipe, levels: Halves) -> Coded:
    """Do the same with the levels of an earlier segment."""
    mask, parts = _scaled(x, recipe)
    return Coded(_codes(x, parts, levels), mask, parts)


def _scaled(x: Floats, recipe: Recipe) -> tuple[Mask, dict[str, NDArray[Any]]]:
    """Mark outliers; find scale and offset per head and token that bring the rest to -1 .. 1."""
    mask = np.empty(x.shape, np.bool_)
    scales, offsets = np.empty(x.shape[:3], np.uint8), np.empty(x.shape[:3], np.int8)
    for row, span in _chunks(x):
        at = (row, slice(None), span)
        mask[at] = _farthest(x[at], recipe)
        dense = np.where(mask[at], x[at].mean(axis=2, keepdims=True), x[at])
        low, high = dense.min(axis=2), dense.max(axis=2)
        middle = (low + high) / 2
        reach = np.maximum(high - middle, np.abs(middle) * (OFFSET_STEPS / OFFSET_MAX))
        scales[at], inverse = _scale_bytes(reach)
        offsets[at] = np.rint(middle * inverse * OFFSET_STEPS)
    return mask, {"scales": scales, "offsets": offsets}


def _scale_bytes(reach: Floats) -> tuple[Bytes, Floats]:
    """Round ``reach`` up to a scale: its byte, and one over it (0 for byte 0)."""
    bits = reach.astype(np.float32).view(np.int32)
    code = np.where(reach > 0, ((bits + (1 << 20) - 1) >> 20) - SCALE_BIAS, 0).clip(0, 255)
    scale = ((code + SCALE_BIAS) << 20).astype(np.int32).view(np.float32)
    return code.astype(np.uint8), np.where(code > 0, 1 / scale, 0).astype(np.float32)


def _normal(x: Floats, scales: Bytes, offsets: NDArray[np.int8]) -> Floats:
    """Return ``x`` ``(..., D)`` in units of its scale, less the offset; 0 where the scale is 0."""
    scale = ((scales.astype(np.int32) + SCALE_BIAS) << 20).view(np.float32)
    inverse = np.where(scales > 0, 1 / scale, 0).astype(np.float32)
    shift = offsets.astype(np.float32) * np.float32(1 / OFFSET_STEPS)
    out: Floats = x * inverse[..., None] - shift[..., None]
    return out


def _fit_sample(
    x: Floats,
    mask: Mask,
    parts: dict[str, NDArray[Any]],
    recipe: Recipe,
    weights: Floats | None,
) -> Halves:
    """Fit levels ``(L,)`` to evenly spaced tokens, ``SAMPLES`` elements or a few more."""
    pick = (slice(None), slice(None), slice(None, None, max(1, x.size // SAMPLES)))
    scales = parts["scales"][pick]
    normal = _normal(x[pick], scales, parts["offsets"][pick])
    use = ~mask[pick] & (scales > 0)[..., None]
    samples = normal[use] if use.any() else np.zeros(1, np.float32)
    weight = weights[pick][use] if weights is not None and use.any() else None
    ordered, weight = _ordered(samples[None], None if weight is None else weight[None])
    first, last = np.zeros(1, np.int64), np.full(1, samples.size)
    levels = nuq.lloyd_max(ordered, recipe.levels, recipe.sweeps, first, last, weight)
    return np.asarray(levels[0], np.float16)


def _codes(x: Floats, parts: dict[str, NDArray[Any]], levels: Halves) -> Bytes:
    codes = np.empty(x.shape, np.uint8)
    for row, span in _chunks(x):
        at = (row, slice(None), span)
        normal = _normal(x[at], parts["scales"][at], parts["offsets"][at])
        codes[at] = nuq.nearest(normal, levels)
    return codes
