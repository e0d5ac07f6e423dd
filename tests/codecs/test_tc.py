"""``tc``: decoding against the reference, rates, plans, and what damaged parts do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import tc as reference
from vkv.codecs.protocol import Parts, Piece
from vkv.codecs.tc import basis as tc_basis
from vkv.codecs.tc import blocks as tc_blocks
from vkv.codecs.tc import coder as tc_coder
from vkv.codecs.tc import entropy as tc_entropy
from vkv.codecs.tc import rate_plan as tc_rate
from vkv.codecs.tc.codec import Tc
from vkv.errors import CodecError


def correlated(*shape: int, seed: int = 0, decay: float = 0.9) -> mx.array:
    """Values on random axes over all heads, of variances that fall by ``decay``, off centre."""
    batch, heads, tokens, dim = shape
    rng = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((heads * dim,) * 2))
    y = rng.laplace(0, 1, (batch, tokens, heads * dim)) * decay ** np.arange(heads * dim)
    x = (y @ axes + np.linspace(-3, 3, heads * dim)).reshape(batch, tokens, heads, dim)
    return mx.array(x.swapaxes(1, 2).astype(np.float32))


def rate(parts: Parts, x: mx.array) -> float:
    return 8 * sum(p.nbytes for p in parts.values()) / x.size


def error(codec: Tc, x: mx.array, basis: mx.array | None = None) -> float:
    """Mean squared error over the variance about the channel means."""
    got = codec.decode(codec.encode(x, basis), x.shape, mx.float32)
    return float(((got - x) ** 2).mean() / ((x - x.mean(2, keepdims=True)) ** 2).mean())


def forged(parts: Parts, name: str, data: bytes | np.ndarray) -> Parts:
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return {**parts, name: mx.array(array)}


X = correlated(1, 2, 300, 16)
CODEC = Tc(step=0.3, axes="joint")
PARTS = CODEC.encode(X)
MOMENTS = tc_basis.covariance(tc_blocks.centred(X)[0])
BASIS = tc_rate.train_basis([MOMENTS], [1.0])[0]


# --- decoding ---


@pytest.mark.parametrize("axes", ["none", "head", "joint", "auto"])
@pytest.mark.parametrize("shape", [(1, 2, 300, 16), (2, 3, 70, 8), (1, 1, 64, 5), (1, 4, 1, 3)])
@pytest.mark.parametrize("step", [0.01, 0.5, 5.0])
def test_decodes_as_the_reference(axes, shape, step):
    """The sums of T9, of integers that the reference reads by the words of T14."""
    codec, x = Tc(step=step, axes=axes), correlated(*shape)
    parts = codec.encode(x)
    codec.validate(parts, shape)
    got = np.array(codec.decode(parts, shape, mx.float32))
    want = reference.decode({n: np.array(p) for n, p in parts.items()}, asdict(codec), shape)
    assert got.shape == want.shape == shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_decodes_in_a_basis_of_other_texts_as_the_reference():
    codec = Tc(step=0.3)
    parts = codec.encode(X, BASIS)
    assert mx.array_equal(parts["basis"], BASIS)
    codec.validate(parts, X.shape)
    got = np.array(codec.decode(parts, X.shape, mx.float32))
    want = reference.decode({n: np.array(p) for n, p in parts.items()}, asdict(codec), X.shape)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_threads_change_nothing(monkeypatch):
    x = correlated(1, 2, 4000, 16)
    alone = CODEC.encode(x), CODEC.decode(CODEC.encode(x), x.shape, mx.float32)
    for name in ("ENCODE_ALONE", "DECODE_ALONE"):
        monkeypatch.setattr(tc_entropy, name, 0)
    monkeypatch.setattr(tc_entropy.os, "cpu_count", lambda: 3)
    parts = CODEC.encode(x)
    assert all(bool(mx.array_equal(parts[n], alone[0][n])) for n in parts)
    assert mx.array_equal(CODEC.decode(parts, x.shape, mx.float32), alone[1])


@pytest.mark.parametrize("axes", ["head", "joint"])
def test_mlx_decodes_as_numpy_does(axes, monkeypatch):
    """What a GPU runs: the same products, in MLX."""
    codec = Tc(axes=axes)
    parts = codec.encode(X)
    want = codec.decode(parts, X.shape, mx.float32)
    monkeypatch.setattr(tc_blocks.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert mx.allclose(codec.decode(parts, X.shape, mx.float32), want, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_gives_the_dtype_asked_for(dtype):
    x = X.astype(dtype)
    got = CODEC.decode(CODEC.encode(x), x.shape, dtype)
    assert got.dtype == dtype
    assert mx.abs(got - x).max() < 2


def test_large_integers_take_four_bytes_and_come_back():
    x = mx.concatenate([X, mx.full((1, 2, 1, 16), 1e5)], axis=2)
    codec = Tc(step=1e-6, axes="none")
    parts = codec.encode(x)
    assert np.array(parts["codes"][4:8]).tolist() == [4, 0, 0, 0]
    got = np.array(codec.decode(parts, x.shape, mx.float32))
    np.testing.assert_allclose(got, np.array(x), rtol=1e-5, atol=0.02)
    want = reference.decode({n: np.array(p) for n, p in parts.items()}, asdict(codec), x.shape)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-3])
def test_constant_channels_cost_nothing_and_are_exact(value):
    x = mx.full((1, 2, 100, 8), value)
    parts = Tc().encode(x)
    assert parts["codes"].size == 8
    np.testing.assert_allclose(np.array(Tc().decode(parts, x.shape, mx.float32)), value, rtol=1e-3)


def test_means_beyond_f16_are_left_to_the_components():
    x = X + 1e6
    got = np.array(CODEC.decode(CODEC.encode(x), x.shape, mx.float32))
    np.testing.assert_allclose(got, np.array(x), rtol=1e-5)


@pytest.mark.parametrize("axes", ["none", "head", "joint"])
def test_a_prefix_has_the_same_integers(axes):
    codec, x = Tc(axes=axes), correlated(2, 3, 200, 8)
    parts, whole = codec.encode(x), x.shape
    cut = codec.prefix(parts, whole, 90)
    assert cut is not None
    short = (*whole[:2], 90, whole[3])
    codec.validate(cut, short)
    got = codec.decode(cut, short, mx.float32)
    assert mx.allclose(got, codec.decode(parts, whole, mx.float32)[:, :, :90], 1e-6, 1e-6)
    assert sum(p.nbytes for p in cut.values()) < sum(p.nbytes for p in parts.values())


# --- rate and error ---


@pytest.mark.parametrize("step", [0.05, 0.2, 1.0])
def test_error_is_that_of_a_uniform_quantizer(step):
    """Reverse water-filling: step^2 / 12, or less where a component is smaller than that."""
    assert error(Tc(step=step, axes="joint"), correlated(1, 2, 4096, 8)) <= 1.05 * step**2 / 12


def test_coarse_axes_cost_no_accuracy():
    """The stored rows are inverted: what they are rounded to does not add to the error."""
    x = correlated(1, 2, 8192, 16)
    z, _ = tc_blocks.centred(x)
    step = 0.1 * tc_blocks.deviation(z)
    own = tc_basis.fit(tc_basis.candidates(z, 2, "joint")[0], step, 8192)
    assert np.abs(own.ints).max() < 64  # 7 bits and less
    assert own.ints.shape[1] == 32
    fine = tc_rate.quantized(tc_basis.principal(tc_basis.covariance(z))[1][None].astype("f4"))
    both = [error(Tc(step=step), x, tc_basis.array(b)) for b in (own, fine)]
    assert both[0] < 1.05 * both[1]


def test_axes_earn_their_rate():
    x = correlated(1, 4, 4096, 16)
    rates = {axes: rate(Tc(step=0.2, axes=axes).encode(x), x) for axes in ("none", "head", "joint")}
    assert rates["joint"] + 0.5 < rates["head"] < rates["none"]
    assert rate(Tc(step=0.2).encode(x), x) == rates["joint"]


def test_auto_leaves_axes_out_where_they_cost_more():
    x = mx.array(np.random.default_rng(0).standard_normal((1, 4, 64, 16)).astype(np.float32))
    assert Tc(step=0.5).encode(x)["basis"].size == 0


def test_codes_are_near_their_entropy():
    x = correlated(1, 1, 40_000, 4, decay=1.0)
    parts = Tc(step=0.5, axes="none").encode(x)
    q = tc_blocks.integers(tc_blocks.read(parts, x.shape), 40_000)
    counts = np.unique(q, return_counts=True)[1] / q.size
    assert 8 * parts["codes"].nbytes / x.size < 1.01 * float(-(counts * np.log2(counts)).sum())


@pytest.mark.parametrize("bits", [1.0, 2.3, 6.0])
def test_bits_count_every_byte(bits):
    x = correlated(1, 2, 2000, 16)
    assert 0.98 * bits <= rate(Tc(bits=bits).encode(x), x) <= bits


def test_the_entropy_model():
    """Against the sum over the integers themselves."""
    for deviation in (0.2, 1.0, 7.0):
        k = np.arange(-400, 401)
        decay = np.sqrt(2) / deviation
        tail = np.exp(-np.abs(k + 0.5) * decay) / 2  # beyond the edge at k + 1/2
        p = np.diff(np.where(k < 0, tail, 1 - tail))
        want = -(p[p > 0] * np.log2(p[p > 0])).sum()
        assert tc_coder.entropy(np.array(deviation)) == pytest.approx(want, rel=1e-6)


# --- bases and plans ---


def test_a_basis_serves_another_text_and_costs_it_nothing():
    other = correlated(1, 2, 300, 16, seed=5)
    own, lent = Tc(step=0.3, axes="joint"), Tc(step=0.3)
    parts = {n: p for n, p in lent.encode(other, BASIS).items() if n != "basis"}
    assert rate(parts, other) < rate(own.encode(other), other) - 0.3
    assert error(lent, other, BASIS) < 1.1 * error(own, other)


def test_a_metric_moves_the_error_to_where_it_is_cheap():
    metric = np.diag(np.where(np.arange(32) < 4, 100.0, 1.0))
    bases = [tc_rate.train_basis([MOMENTS], [m])[0] for m in (metric, np.eye(32))]
    dear = []
    for basis in bases:
        codec = Tc(step=0.3)
        off = np.array(codec.decode(codec.encode(X, basis), X.shape, mx.float32) - X)
        flat = np.square(off.swapaxes(1, 2).reshape(-1, 32)).mean(0)
        dear.append(flat[:4].sum() / flat.sum())
    assert dear[0] < dear[1] / 4


def pieces() -> list[Piece]:
    return [
        Piece(layer, keys, correlated(1, 2, 400, 16, seed=2 * layer + keys) * (1 + layer))
        for layer in range(3)
        for keys in (True, False)
    ]


def test_a_plan_gives_early_layers_and_values_finer_steps():
    steps = [p.codec.step for p in Tc(step=0.5 * 2**0.5).plan(pieces())]
    assert steps[1] < steps[3] < steps[5]
    assert steps[1] < steps[0] / 2
    assert np.exp(np.mean(np.log(steps))) == pytest.approx(0.5, rel=1e-3)
    assert [p.codec.pre_rope for p in Tc().plan(pieces())] == [True, False] * 3


def test_a_plan_follows_the_weights_it_is_given():
    steps = [p.codec.step for p in Tc().plan(pieces(), weights_of=[4, 1, 1, 1, 1, 1])]
    assert steps[1] == pytest.approx(2 * steps[0], rel=1e-3)


def test_a_plan_keeps_to_its_bits():
    """Sinks, tables and what the file adds are counted."""
    todo = pieces()
    found = Tc(bits=4.0).plan(todo, overhead=500)
    used = 500
    for planned, p in zip(found, todo, strict=True):
        codec, parts = planned.codec, planned.parts
        lead, body = codec.span(400, 0)
        assert (lead, body, codec.bits) == (4, 396, 4)  # as asked
        again = replace(codec, bits=0.0).encode(p.x[:, :, lead:])
        assert all(bool(mx.array_equal(again[n], parts[n])) for n in again)
        used += lead * p.x.nbytes // 400 + sum(a.nbytes for a in parts.values())
    assert 0.98 * 4 <= 8 * used / sum(p.x.size for p in todo) <= 4


@pytest.mark.parametrize(
    ("tokens", "start", "want"),
    [
        (1000, 0, (4, 896)),
        (1000, 500, (0, 900)),
        (150, 0, (0, 0)),
        (0, 0, (0, 0)),
        (164, 9, (0, 64)),
    ],
)
def test_span(tokens, start, want):
    assert Tc(tail=100).span(tokens, start) == want


def test_configure_gives_values_half_the_step():
    assert Tc.configure({"step": 1}, "keys", "F16") == Tc(step=1.0)
    assert Tc.configure({"step": 1}, "values", "F16") == Tc(step=0.5, pre_rope=False)
    assert Tc.configure({}, "values", "F16").step == Tc().step / 2


def test_a_plan_in_a_given_basis_has_one_step_and_does_not_count_it():
    moments = [tc_basis.covariance(tc_blocks.centred(p.x)[0]) for p in pieces()]
    tables = tc_rate.train_basis(moments, tc_rate.weights(pieces()))
    todo = [replace(p, basis=b) for p, b in zip(pieces(), tables, strict=True)]
    found = Tc(bits=3.0).plan(todo)
    assert len({p.codec.step for p in found}) == 1
    used = sum(4 * p.x.nbytes // 400 for p in todo)
    for planned, table in zip(found, tables, strict=True):
        assert mx.array_equal(planned.parts["basis"], table)
        used += sum(a.nbytes for name, a in planned.parts.items() if name != "basis")
    assert 0.98 * 3 <= 8 * used / sum(p.x.size for p in todo) <= 3


@pytest.mark.parametrize("bits", [0.01, 0.125])
def test_rates_stay_above_what_a_reader_refuses(bits):
    """H10: 64 elements a byte, tables left out."""
    x = correlated(1, 4, 1000, 64)
    for parts in (Tc(bits=bits).encode(x), Tc(step=900.0).encode(x)):
        assert 64 * sum(a.nbytes for n, a in parts.items() if n != "basis") >= x.size
        Tc().validate(parts, x.shape)


def test_rates_of_tensors_that_matter_little_stay_above_it_too():
    """In a basis that knows it: their components are far below any step."""
    tables = tc_rate.train_basis([MOMENTS, MOMENTS], [1.0, 1e-8])
    x = correlated(1, 2, 4000, 16)
    todo = [Piece(0, False, x, basis=table) for table in tables]
    for planned in Tc(bits=1.0).plan(todo):
        assert planned.codec.id == "tc"
        own = sum(a.nbytes for n, a in planned.parts.items() if n != "basis")
        assert 64 * own >= x[:, :, 4:].size


def test_a_tensor_of_one_value_is_left_raw_where_a_reader_would_refuse_it():
    todo = [Piece(0, True, mx.ones((1, 4, 5000, 64))), Piece(0, False, correlated(1, 4, 500, 64))]
    first, second = Tc(bits=8.0).plan(todo)
    assert (first.codec.id, first.parts, second.codec.id) == ("raw", None, "tc")
    assert "same" in (first.note or "")


# --- what is refused ---


@pytest.mark.parametrize(
    "options",
    [
        {"step": 0.0}, {"step": 1}, {"step": float("nan")}, {"bits": -1.0}, {"bits": 17.0},
        {"axes": "all"}, {"n_sink": -1}, {"n_sink": 1.0}, {"tail": 1 << 17}, {"pre_rope": 1},
    ],
)  # fmt: skip
def test_parameters(options):
    with pytest.raises(CodecError) as exc:
        Tc(**options)
    assert exc.value.rule == "T1"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(bad):
    x = mx.concatenate([X, mx.full((1, 2, 1, 16), bad)], axis=2)
    with pytest.raises(CodecError) as exc:
        Tc().encode(x)
    assert exc.value.rule == "T3"


def test_a_step_too_small_for_the_integers():
    x = mx.concatenate([X, mx.full((1, 2, 1, 16), 1e9)], axis=2)
    with pytest.raises(CodecError) as exc:
        Tc(step=1e-6).encode(x, BASIS)
    assert exc.value.rule == "T4"


def flip(part: str, at: int, value: int) -> Parts:
    data = np.array(PARTS[part]).copy()
    data.reshape(-1)[at] = value
    return forged(PARTS, part, data)


CODES, TABLE = np.array(PARTS["codes"]).tobytes(), np.array(PARTS["basis"]).tobytes()
NAN = np.float32("nan").tobytes()
#: ``bytes`` of a chunk: mode, log and count of bins; then nothing.
BAD = {
    "T3-mean": (forged(PARTS, "mean", np.full((2, 16), np.inf, np.float16)), "T3"),
    "T7-fewer": ({**PARTS, "components": PARTS["components"][1:]}, "T7"),
    "T7-hole": (flip("components", 0, 9), "T7"),
    "T8-step": (forged(PARTS, "codes", NAN + CODES[4:]), "T8"),
    "T8-width": (flip("codes", 4, 3), "T8"),
    "T8-short": (forged(PARTS, "codes", CODES[:6]), "T8"),
    "T11-size": (flip("codes", 8, 1), "T11"),
    "T11-huge": (flip("codes", 11, 255), "T11"),
    "T11-more": (forged(PARTS, "codes", CODES + b"\0"), "T11"),
    "T11-cut": (forged(PARTS, "codes", CODES[:9]), "T11"),
    "T12-mode": (flip("codes", 12, 1), "T12"),
    "T12-lookback": (flip("codes", 12, 0x20), "T12"),
    "T20-groups": (flip("basis", 0, 3), "T20"),
    "T20-rows": (flip("basis", 4, 33), "T20"),
    "T20-columns": (flip("basis", 8, 31), "T20"),
    "T20-empty": (forged(PARTS, "basis", b"\0"), "T20"),
    "T21-short": (forged(PARTS, "basis", TABLE[:20]), "T21"),
    "T22-scale": (forged(PARTS, "basis", TABLE[:12] + NAN + TABLE[16:]), "T22"),
    "T11-basis": (forged(PARTS, "basis", TABLE[:-1]), "T11"),
    "K3-dtype": ({**PARTS, "codes": PARTS["codes"].astype(mx.uint16)}, "K3"),
    "K3-mean": ({**PARTS, "mean": PARTS["mean"][:1]}, "K3"),
    "K3-missing": ({n: p for n, p in PARTS.items() if n != "basis"}, "K3"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_parts(case):
    parts, rule = BAD[case]
    with pytest.raises(CodecError) as exc:
        CODEC.validate(parts, X.shape)
    assert exc.value.rule == rule


def test_forged_scales_overflow_without_an_error():
    scales = np.full(TABLE[4], 3e38, "<f4").tobytes()
    parts = forged(PARTS, "basis", TABLE[:12] + scales + TABLE[12 + len(scales) :])
    CODEC.validate(parts, X.shape)
    assert not mx.isfinite(CODEC.decode(parts, X.shape, mx.float32)).all()


def test_more_elements_than_bytes_can_mean():
    with pytest.raises(CodecError) as exc:
        CODEC.validate(PARTS, (1, 2, 1 << 40, 16))
    assert exc.value.rule == "T6"


def test_more_products_than_bytes_can_mean():
    """Elements and rows that are each few enough for their bytes, but not together."""
    with pytest.raises(CodecError) as exc:
        CODEC.validate(PARTS, (1, 2, 100_000, 16))
    assert exc.value.rule == "T6"
    assert "products" in str(exc.value)


def test_more_rows_than_bytes_can_mean():
    """A chunk of one value takes 6 bytes, whatever its length."""
    rows = np.zeros((1, 600, 20_000), np.int16)
    table = tc_basis.Basis(rows, np.ones((1, 600), np.float32)).dump()
    assert len(table) < 10_000
    with pytest.raises(CodecError) as exc:
        tc_basis.load(table, 1, 20_000, 64)
    assert exc.value.rule == "T21"


@pytest.mark.parametrize("tokens", [299, 301, 1, 10_000])
def test_another_number_of_tokens(tokens):
    shape = (1, 2, tokens, 16)
    CODEC.validate(PARTS, shape)
    with pytest.raises(CodecError) as exc:
        CODEC.decode(PARTS, shape, mx.float32)
    assert exc.value.rule == "T13"


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(["codes", "basis", "components"]),
    st.integers(0, 4000),
    st.binary(max_size=6),
    st.integers(0, 6),
)
def test_damage_raises_only_codec_errors(part, at, insert, drop):
    data = np.array(PARTS[part]).tobytes()
    at %= len(data)
    data = data[:at] + insert + data[at + drop :]
    array = np.frombuffer(data, np.uint8)
    parts = forged(
        PARTS, part, array if part != "components" else array[: len(data) // 2 * 2].reshape(-1, 2)
    )
    try:
        CODEC.validate(parts, X.shape)
        got = CODEC.decode(parts, X.shape, mx.float32)
    except CodecError:
        return
    assert got.shape == X.shape


FUZZ = """
import numpy as np
from tests.helpers.memory import peak
from vkv.codecs.tc import entropy as te
from vkv.errors import CodecError
r, good = np.random.default_rng(0), []
for sd in (0, .2, 1, 5, 300, 9000):
    for n in (1, 255, 257, 4096):
        x = np.rint(r.laplace(0, sd + 1e-9, n)).clip(-9999, 9999)
        good.append(te._compress(x.astype("i2")))
for i in range(10000):
    data = bytearray(good[r.integers(len(good))])
    for _ in range(r.integers(1, 4)):
        at = int(r.integers(len(data)))
        data[at : at + int(r.integers(3))] = r.bytes(int(r.integers(3)))
        data = data or bytearray(1)
    data[0] = 0
    try:
        te._decompress(bytes(data), np.empty(int(r.choice([1, 256, 4096])), "i2"), "codes")
    except CodecError:
        pass
print(peak())
"""


def test_damaged_chunks_neither_crash_nor_take_memory():
    """In a process of its own: an abort inside the library would end this one."""
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 300 << 20
