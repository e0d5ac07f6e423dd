"""Levels and outliers: what the fit and the selection promise."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from vkv.codecs.bits import pack
from vkv.codecs.kvquant import levels as nuq
from vkv.codecs.kvquant import outliers
from vkv.errors import CodecError

RNG = np.random.default_rng


def rows(kind: str, count: int = 6, size: int = 1024, seed: int = 0) -> np.ndarray:
    rng = RNG(seed)
    draw = {
        "normal": lambda: rng.standard_normal((count, size)),
        "laplace": lambda: rng.laplace(size=(count, size)),
        "uniform": lambda: rng.uniform(-1, 1, (count, size)),
        "lognormal": lambda: rng.lognormal(0, 1.5, (count, size)),
        "two": lambda: rng.choice([-3.0, 5.0], (count, size)),
        "constant": lambda: np.full((count, size), 2.5),
        "far": lambda: 1000 + rng.standard_normal((count, size)),
        "few": lambda: rng.standard_normal((count, size)).round(1),
    }
    return draw[kind]().astype(np.float32)


KINDS = ["normal", "laplace", "uniform", "lognormal", "two", "constant", "far", "few"]


def fit(x: np.ndarray, levels: int = 8, sweeps: int = 8, weights=None) -> np.ndarray:
    order = np.argsort(x, axis=1, kind="stable")
    ordered = np.take_along_axis(x, order, axis=1)
    weights = None if weights is None else np.take_along_axis(weights, order, axis=1)
    first, last = np.zeros(len(x), np.int64), np.full(len(x), x.shape[1])
    return nuq.lloyd_max(ordered, levels, sweeps, first, last, weights)


def error(x: np.ndarray, levels: np.ndarray, weights=1.0) -> float:
    """Mean squared distance to the nearest level, in float64."""
    far = np.abs(x[:, :, None].astype(np.float64) - levels[:, None, :])
    return float((weights * far.min(axis=2) ** 2).mean())


# --- the fit ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [4, 8, 16])
def test_no_sweep_raises_the_error(kind, levels):
    x = rows(kind)
    errors = [error(x, fit(x, levels, sweeps)) for sweeps in range(12)]
    scale = float((x.astype(np.float64) ** 2).mean())
    assert all(b <= a + 1e-13 * scale for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("kind", KINDS)
def test_no_sweep_raises_the_weighted_error(kind):
    x = rows(kind)
    weights = RNG(1).lognormal(0, 1, x.shape).astype(np.float32)
    errors = [error(x, fit(x, 8, n, weights), weights) for n in range(12)]
    scale = float((x.astype(np.float64) ** 2).mean())
    assert all(b <= a + 1e-12 * scale for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sweeps", [0, 8])
def test_levels_ascend_within_the_samples(kind, sweeps):
    x = rows(kind)
    levels = fit(x, 16, sweeps)
    assert (np.diff(levels, axis=1) >= 0).all()
    slack = 1e-6 * np.abs(x).max()
    assert (levels >= x.min(axis=1, keepdims=True) - slack).all()
    assert (levels <= x.max(axis=1, keepdims=True) + slack).all()


def test_the_fit_comes_near_the_best_known_for_a_normal_source():
    """Max 1960: least errors of 4, 8 and 16 levels for N(0, 1)."""
    x = rows("normal", 4, 1 << 15)
    for levels, best in ((4, 0.11748), (8, 0.03454), (16, 0.009497)):
        assert error(x[:1], fit(x[:1], levels)) == pytest.approx(best, rel=0.05)


def test_eight_sweeps_from_the_start_beat_eight_from_quantiles():
    x = rows("laplace", 4, 4096)
    at = np.quantile(x, (np.arange(8) + 0.5) / 8, axis=1).T
    for _ in range(8):
        near = np.abs(x[:, :, None] - at[:, None, :]).argmin(axis=2)
        at = np.stack([[r[n == k].mean() for k in range(8)] for r, n in zip(x, near, strict=True)])
    assert error(x, fit(x)) < 0.97 * error(x, at)


def test_as_many_samples_as_levels_are_kept_exactly_by_enough_sweeps():
    x = np.array([[0.0, 1, 2, 3, 4, 5, 6, 7]], np.float32)
    assert error(x, fit(x, 8, 20)) == 0


def test_a_weight_draws_a_level():
    x = np.linspace(-1, 1, 201, dtype=np.float32)[None]
    weights = np.where(np.abs(x - 0.35) < 1e-3, 1e6, 1).astype(np.float32)
    assert np.abs(fit(x, 4, 20, weights) - 0.35).min() < 1e-3
    assert np.abs(fit(x, 4, 20) - 0.35).min() > 0.05


def test_samples_outside_the_range_do_not_count():
    x = np.sort(rows("normal", 1), axis=1)
    x[0, :10], x[0, -5:] = -1e4, 1e4
    cut = nuq.lloyd_max(x, 8, 8, np.array([10]), np.array([x.shape[1] - 5]))
    np.testing.assert_allclose(cut, fit(x[:, 10:-5]), rtol=1e-6)


def test_the_fit_is_deterministic():
    x = rows("laplace")
    np.testing.assert_array_equal(fit(x), fit(x.copy()))


@pytest.mark.parametrize("kind", KINDS)
def test_nearest_is_nearest(kind):
    x = rows(kind)
    levels = fit(x).astype(np.float16)
    codes = nuq.nearest(x.T, levels.T).T
    far = np.abs(x[:, :, None].astype(np.float64) - levels[:, None, :])
    chosen = np.take_along_axis(far, codes[:, :, None].astype(np.int64), axis=2)[:, :, 0]
    np.testing.assert_allclose(chosen, far.min(axis=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [6, 7])
@pytest.mark.parametrize("tokens", [3, 70, 300])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lookup_by_channel(bits, dtype, tokens, dim):
    """Alone and in pairs: both ways must give what indexing gives."""
    rng, shape = RNG(2), (2, 3, tokens, dim)
    codes = rng.integers(0, 1 << bits, shape)
    levels = mx.array(rng.standard_normal((2, 3, dim, 1 << bits))).astype(dtype)
    got = nuq.by_channel(pack(mx.array(codes), bits), bits, levels, shape)
    table = np.array(levels.astype(mx.float32))
    want = table[np.ogrid[:2, :3, :1, :dim][0], np.arange(3)[:, None, None], np.arange(dim), codes]
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), want)


# --- which elements are outliers ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize("centre", ["mean", "zero"])
def test_the_farthest_are_chosen(kind, count, centre):
    ordered = np.sort(rows(kind), axis=1)
    middle = ordered.mean(axis=1) if centre == "mean" else np.zeros(len(ordered), np.float32)
    first, last = outliers.dense_range(ordered, middle, count)
    assert (last - first == ordered.shape[1] - count).all()
    for r, (a, b) in enumerate(zip(first, last, strict=True)):
        far = np.abs(ordered[r] - middle[r])
        chosen = np.concatenate([far[:a], far[b:]])
        assert sorted(chosen) == pytest.approx(sorted(far)[len(far) - count :])


@pytest.mark.parametrize("kind", ["constant", "two", "few", "normal"])
def test_ties_never_over_select(kind):
    x = rows(kind)
    far = np.abs(x)
    for count in (1, 10, 300):
        least = np.sort(far, axis=1)[:, -count, None]
        mask = outliers.exactly(far > least, far == least, count)
        assert (mask.sum(axis=1) == count).all()
        assert (far[mask].reshape(len(x), count).min(axis=1) == least[:, 0]).all()


# --- the list ---


def listed(mask: np.ndarray, seed: int = 3) -> tuple[mx.array, mx.array, np.ndarray]:
    x = RNG(seed).standard_normal(mask.shape).astype(np.float16)
    return *outliers.pack(mask, mx.array(x)), x


SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 64, 300), (1, 1, 3, 255), (1, 1, 4, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.5, 1])
def test_a_list_puts_back_what_it_took(shape, share):
    mask = RNG(4).random(shape) < share
    gaps, values, x = listed(mask)
    outliers.validate(gaps, values, mask.size)
    got = np.array(outliers.place(mx.zeros(shape), gaps, values))
    np.testing.assert_array_equal(got, np.where(mask, x, 0).astype(np.float32))
    assert gaps.size <= mask.sum() + 1 + mask.size // 255


@pytest.mark.parametrize("at", [0, 254, 255, 256, 509, 510, 511, 764, 765, 999])
def test_gaps_around_a_skip(at):
    mask = np.zeros((1, 1, 10, 100), bool)
    mask.flat[at] = True
    gaps, values, x = listed(mask)
    outliers.validate(gaps, values, mask.size)
    got = np.array(outliers.place(mx.zeros(mask.shape), gaps, values))
    assert np.flatnonzero(got).tolist() == [at]
    assert got.flat[at] == x.flat[at]


def test_a_list_is_cut_and_joined_at_any_token():
    mask = RNG(5).random((2, 3, 12, 50)) < 0.01
    gaps, values, x = listed(mask)
    for tokens in range(13):
        elements = 2 * 3 * 50 * tokens
        one = outliers.prefix(gaps, values, elements)
        outliers.validate(*one, elements)
        if 0 < tokens < 12:
            same = outliers.pack(mask[:, :, :tokens], mx.array(x[:, :, :tokens]))
            two = outliers.pack(mask[:, :, tokens:], mx.array(x[:, :, tokens:]))
            for whole, part in ((one, same), ((gaps, values), outliers.join([one, two]))):
                assert all(mx.array_equal(a, b) for a, b in zip(whole, part, strict=True))


BAD = {
    "nothing": ([], [], "gaps"),
    "no end": ([3], [], "gaps"),
    "ends early": ([3, 5], [1], "gaps"),
    "ends late": ([3, 7], [1], "gaps"),
    "past the end": ([200], [], "gaps"),
    "skips only": ([255], [], "gaps"),
    "a skip behind the end": ([10, 255], [], "gaps"),
    "too few values": ([3, 6], [], "outliers"),
    "too many values": ([3, 6], [1, 2], "outliers"),
}


@pytest.mark.parametrize("case", BAD)
def test_q6_lists_that_do_not_fit(case):
    gaps, values, at = BAD[case]
    with pytest.raises(CodecError) as exc:
        outliers.validate(mx.array(gaps, mx.uint8), mx.array(values, mx.float16), 10)
    assert (exc.value.rule, exc.value.at) == ("Q6", at)
    outliers.validate(mx.array([3, 6], mx.uint8), mx.array([1], mx.float16), 10)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_q7_values_are_finite(value):
    with pytest.raises(CodecError) as exc:
        outliers.validate(mx.array([3, 6], mx.uint8), mx.array([value], mx.float16), 10)
    assert exc.value.rule == "Q7"
