"""``nsnquant``: decoding against the reference, encoding against what it promises."""

from __future__ import annotations

from dataclasses import asdict, replace
from hashlib import sha256
from itertools import pairwise
from math import sqrt

import mlx.core as mx
import numpy as np
import pytest

from tests.helpers.codecs import fixed_bytes
from tests.reference import nsnquant as reference
from vkv.codecs.nsnquant import codebooks, hadamard
from vkv.codecs.nsnquant import transform as nsn
from vkv.codecs.nsnquant.codebook_search import GRID, LIMIT, STEPS, Search
from vkv.codecs.nsnquant.codebooks import Spec
from vkv.codecs.nsnquant.codec import NSNQuant
from vkv.codecs.nsnquant.searchable import searchable
from vkv.codecs.options import build, parse_options
from vkv.errors import CodecError

SEED = {"match": "cosine", "fit": "nsn", "metadata_bits": 16, "pre_rope": False}
FINE = {"metadata_bits": 16}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def biased(heads: int = 4, tokens: int = 256, dim: int = 128, bias: float = 4) -> np.ndarray:
    """Tokens of log-normal lengths, the first four channels 15 times as large and off centre."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, heads, tokens, dim))
    x[..., :4] = 15 * (x[..., :4] + bias)
    return (x * rng.lognormal(0, 0.8, (1, heads, tokens, 1))).astype(np.float32)


def there_and_back(codec: NSNQuant, x: np.ndarray, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    parts = codec.encode(mx.array(x))
    codec.validate(parts, x.shape)
    return np.array(codec.decode(parts, x.shape, dtype).astype(mx.float32))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Mean over the tokens."""
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return float(((x * y).sum(-1) / norms).mean())


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(bool(mx.array_equal(a[n], b[n])) for n in a)


# --- decoding ---


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(
    ("options", "dim"),
    [
        *(({}, dim) for dim in (32, 64, 96, 128, 160, 192, 224, 256)),
        *((FINE, dim) for dim in (8, 24, 40, 48, 56, 80, 112, 128)),
        ({"window": 2}, 64),
        ({"window": 6}, 64),
        ({"window": 48}, 32),
        ({"window": 7, **FINE}, 64),
        (SEED, 128),
        ({"fold": "least"}, 64),
        ({"fold": "orthogonal"}, 64),
        ({"fit": "nsn"}, 64),
    ],
)
def test_decodes_as_the_reference(bits, options, dim):
    codec = NSNQuant(bits=bits, **options)
    shape = (2, 3, 4 * codec.window, dim)
    parts = codec.encode(mx.array(2 + normal(*shape)))
    codec.validate(parts, shape)
    got = np.array(codec.decode(parts, shape, mx.float32))
    want = reference.decode({n: np.array(p) for n, p in parts.items()}, asdict(codec), shape)
    assert got.shape == want.shape == shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_dtype_asked_for(dtype):
    codec = NSNQuant(window=8)
    x = mx.array(normal(1, 1, 16, 32)).astype(dtype)
    assert codec.decode(codec.encode(x), x.shape, dtype).dtype == dtype


def test_n5_values_stay_finite():
    """Rule N5: near the end of F16's range errors do not become infinities."""
    x = np.clip(6e4 * np.sign(normal(1, 1, 64, 64)), -65504, 65504)
    y = there_and_back(NSNQuant(), x, mx.float16)
    assert np.isfinite(y).all()
    assert np.abs(y).max() == 65504


@pytest.mark.parametrize("dim", [8, 24, 40, 80, 112, 128, 160, 192, 224])
def test_hadamard_there_and_back(dim):
    x = mx.array(normal(5, dim))
    h = np.array(hadamard.forward(mx.eye(dim))).T
    np.testing.assert_allclose(h, reference.hadamard(dim), atol=1e-6)
    np.testing.assert_allclose(hadamard.forward(hadamard.inverse(x)), x, atol=2e-6)
    np.testing.assert_allclose(hadamard.inverse(hadamard.forward(x)), x, atol=2e-6)


# --- the transform ---


@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("fit", ["nsn", "project"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nsn_is_exact_without_quantization(fine, fit, dim):
    """Metadata is quantized before it is used, so that its error comes back through z."""
    x = biased(heads=2, tokens=64, dim=dim)[0]
    ready = nsn.prepare(mx.array(x), signs=False, fine=fine, fit=fit)
    parts = ready.parts
    if fine:
        s1, o = parts["s1"].astype(mx.float32), parts["o"].astype(mx.float32)
    else:
        s1 = nsn.dequantize(nsn.unpack(parts["s1"], 4, 64), parts["s1_range"])
        o = nsn.unpack(parts["o"], 4, dim).reshape(2, -1, nsn.GROUP)
        o = nsn.dequantize(o, parts["o_range"]).reshape(2, dim)
    back = s1[..., None] * (ready.s2 * hadamard.forward(ready.z) + o[:, None])
    np.testing.assert_allclose(back, x, atol=2e-5 * np.abs(x).max())


def test_tokens_have_unit_variance_and_channels_no_mean():
    """The second normalization moves the mean again, a little."""
    x = biased()[0]
    ready = nsn.prepare(mx.array(x), signs=False, fine=True, fit="nsn")
    np.testing.assert_allclose(nsn.rms(ready.z), 1, rtol=1e-5)
    once = x / np.sqrt((x**2).mean(-1, keepdims=True))
    twice = np.array(hadamard.forward(ready.z))
    assert np.abs(twice.mean(axis=1)).max() < 0.1 * np.abs(once.mean(axis=1)).max()


def test_project_leaves_less_to_the_codes():
    def left(fit: str) -> float:
        x = mx.array(biased().reshape(-1, 64, 128))
        ready = nsn.prepare(x, signs=False, fine=False, fit=fit)
        s1 = nsn.dequantize(nsn.unpack(ready.parts["s1"], 4, 64), ready.parts["s1_range"])
        return ((s1[..., None] * ready.s2) ** 2).mean().item()

    assert left("project") < 0.7 * left("nsn")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_total(length, axis):
    x = normal(length, length, length)
    np.testing.assert_allclose(
        nsn.total(mx.array(x), axis), x.sum(axis, keepdims=True), rtol=1e-4, atol=1e-4
    )


def test_four_bits_are_within_half_a_step():
    x = mx.array(normal(50, 33))
    codes, ranges = nsn.quantize(x)
    assert set(np.unique(codes)) <= set(range(16))
    error = np.abs(np.array(nsn.dequantize(codes, ranges) - x))
    assert (error <= np.array(ranges[:, :1]) * 0.51 + 2e-3).all()


def test_no_scale_of_a_projection_is_near_zero():
    codes, ranges = nsn.quantize(mx.array(normal(500, 64)), avoid_zero=True)
    s1, step = np.abs(np.array(nsn.dequantize(codes, ranges))), np.array(ranges)[:, :1]
    assert (s1 > step / 9).all()


# --- codebooks and the search ---


#: Start of the SHA-256 of the shipped file, and of what five steps give 16 rows.
CODEBOOKS = [
    (Spec(magnitude=True, cosine=False), "d712e9624105e9d1", "82839e4152853df4"),
    (Spec(magnitude=True, cosine=True), "ae17b4cc5e31cfc1", "a7c084b4d59de8f2"),
    (Spec(magnitude=False, cosine=False), "6eb856933b09d401", "3ba7788ed146d9bc"),
    (Spec(magnitude=False, cosine=True), "590f8885c4b0a75b", "01cffb7d18d15bba"),
]


def digest(rows: np.ndarray) -> str:
    return sha256(rows.astype("<f2").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("spec", "shipped", "short"), CODEBOOKS, ids=lambda v: str(v)[:12])
def test_codebooks_are_deterministic(spec, shipped, short):
    """The same bytes on every machine: the sums of the training are exact."""
    assert digest(codebooks.load(spec)) == shipped
    assert digest(codebooks.train(replace(spec, size=16), 5)) == short
    assert digest(codebooks.train(replace(spec, size=16, seed=7), 5)) != short


@pytest.mark.parametrize("spec", [c[0] for c in CODEBOOKS], ids=lambda s: s.file)
def test_shipped_codebooks(spec):
    rows = codebooks.load(spec).astype(np.float64)
    assert rows.shape == (256, 8)
    assert len(np.unique(rows, axis=0)) == 256
    np.testing.assert_array_equal(rows * GRID, np.round(rows * GRID))
    assert np.abs(rows).max() < LIMIT
    assert (rows > 0).all() == spec.magnitude
    if spec.cosine:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), sqrt(8), rtol=2e-3)


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (Spec(magnitude=True, cosine=False), 0.0945),
        (Spec(magnitude=False, cosine=False), 0.3225),
        (Spec(magnitude=True, cosine=True), 0.123),
    ],
    ids=lambda s: s.file if isinstance(s, Spec) else "",
)
def test_error_in_the_code_domain(spec, limit):
    """Mean squared error of N(0, 1), per element."""
    x = normal(1 << 13, 128, seed=3)
    rows, search = searchable(spec)
    if spec.cosine:
        x *= sqrt(128) / np.linalg.norm(x, axis=1, keepdims=True)
    seen = np.abs(x) if spec.magnitude else x
    code = np.array(rows[search(mx.array(seen).reshape(-1, 8))]).reshape(x.shape)
    if spec.cosine:
        code *= sqrt(128) / np.linalg.norm(code, axis=1, keepdims=True)
    assert ((seen - code) ** 2).mean() < limit


@pytest.mark.parametrize("cosine_match", [True, False])
@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize("dim", [4, 8, 16])
def test_search_finds_the_nearest(dim, magnitude, cosine_match):
    """By cells a rare winner can be missed; by one product it cannot."""
    rows = np.abs(normal(64, dim, seed=5)) if magnitude else normal(64, dim, seed=5)
    if cosine_match:
        rows *= sqrt(dim) / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.round(rows * GRID) / GRID
    x = np.abs(normal(4001, dim, seed=6)) if magnitude else normal(4001, dim, seed=6)
    grid = np.round(x * STEPS) / STEPS
    score = grid @ rows.T - (0 if cosine_match else (rows**2).sum(1) / 2)
    search = Search(rows.astype(np.float32), magnitude=magnitude, cosine=cosine_match)
    exact = np.array(search._score(mx.array(grid * STEPS)))
    found = np.array(search(mx.array(x)))
    of = np.arange(len(x))
    np.testing.assert_allclose(score[of, exact], score.max(1), atol=1e-3)
    lost = score.max(1) - score[of, found]
    assert lost.mean() < 4e-3 * np.abs(score.max(1)).mean()


# --- the whole codec ---


@pytest.mark.parametrize(
    ("options", "dim", "want"),
    [
        ({"bits": 2}, 128, 2 + 16 / 128 + (4 + 32 / 64) / 128 + (4 + 32 / 32) / 64),
        ({"bits": 1}, 128, 1 + 16 / 128 + (4 + 32 / 64) / 128 + (4 + 32 / 32) / 64),
        ({"bits": 2}, 64, 2 + 16 / 64 + (4 + 32 / 64) / 64 + (4 + 32 / 32) / 64),
        ({"bits": 1, "window": 128}, 128, 1 + 16 / 128 + (4 + 32 / 128) / 128 + 5 / 128),
        ({"bits": 2, **SEED}, 128, 2.5),
        ({"bits": 2, **SEED}, 64, 2.75),
        ({"bits": 1, **SEED}, 128, 1.5),
        ({"bits": 2, "subvector_dim": 16, "codebook_size": 16}, 128, 1.5 + 0.23828125),
    ],
)
def test_bits_per_element(options, dim, want):
    codec = NSNQuant(**options)
    shape = (2, 3, 2 * codec.window, dim)
    size = fixed_bytes(codec, shape) - 2 * codec.codebook_size * codec.subvector_dim
    assert 8 * size / np.prod(shape) == want


def test_bits_of_real_parts():
    x = mx.array(normal(1, 2, 128, 128))
    parts = NSNQuant().encode(x)
    assert sum(p.nbytes for p in parts.values()) == fixed_bytes(NSNQuant(), x.shape)
    assert round(8 * (fixed_bytes(NSNQuant(), x.shape) - 4096) / x.size, 3) == 2.238


@pytest.mark.parametrize("options", [{}, {"bits": 1}, SEED, {"window": 10}])
def test_any_split_gives_the_same_bits(options):
    """Prefill and token by token: a window is coded alone, whatever else the call carries."""
    codec = NSNQuant(**options)
    x = mx.array(biased(heads=2, tokens=6 * codec.window, dim=64))
    whole = codec.encode(x)
    window = codec.window
    for cuts in ([0, 1, 2, 3, 4, 5, 6], [0, 4, 6], [0, 1, 6]):
        pieces = [codec.encode(x[:, :, a * window : b * window]) for a, b in pairwise(cuts)]
        assert same(codec.join(pieces), whole)
        earlier = codec.select(whole, 0, cuts[1])
        assert same(pieces[0], earlier)


def test_prefix_and_windows():
    codec = NSNQuant(window=16)
    x = mx.array(normal(1, 2, 64, 64))
    parts = codec.encode(x)
    assert codec.prefix(parts, x.shape, 24) is None
    assert same(codec.prefix(parts, x.shape, 32), codec.encode(x[:, :, :32]))
    full = codec.decode(parts, x.shape, mx.float32)
    middle = codec.decode(codec.select(parts, 1, 3), (1, 2, 32, 64), mx.float32)
    np.testing.assert_array_equal(middle, full[:, :, 16:48])


def test_join_needs_one_codebook():
    parts = NSNQuant(window=16).encode(mx.array(normal(1, 1, 16, 64)))
    other = parts | {"codebook": parts["codebook"] * 2}
    assert NSNQuant(window=16).join([parts, other]) is None


@pytest.mark.parametrize(("tokens", "body"), [(0, 0), (63, 0), (64, 64), (200, 192)])
def test_span_is_whole_windows(tokens, body):
    assert NSNQuant().span(tokens, 7) == (0, body)


def test_decodes_with_the_codebook_it_came_with():
    codec = NSNQuant()
    x = mx.array(normal(1, 1, 64, 64) - 0)
    parts = codec.encode(x)
    half = parts | {"codebook": parts["codebook"] * 0.5, "s2": parts["s2"] * 2}
    np.testing.assert_allclose(
        codec.decode(half, x.shape, mx.float32), codec.decode(parts, x.shape, mx.float32), rtol=1e-5
    )


@pytest.mark.parametrize("options", [{}, SEED])
def test_two_bits_are_better_than_one(options):
    x = normal(1, 2, 256, 128)
    two = cosine(x, there_and_back(NSNQuant(bits=2, **options), x))
    one = cosine(x, there_and_back(NSNQuant(bits=1, **options), x))
    assert two > 0.93
    assert one > 0.80
    assert two > one + 0.08


@pytest.mark.parametrize("options", [{}, SEED])
@pytest.mark.parametrize("bias", [2, 4])
def test_reconstruction(options, bias):
    x = biased(bias=bias)
    assert cosine(x, there_and_back(NSNQuant(bits=2, **options), x)) > 0.96
    assert cosine(x, there_and_back(NSNQuant(bits=1, **options), x)) > 0.84


def without_nsn(codec: NSNQuant, x: np.ndarray) -> np.ndarray:
    """The same rotation and codebook on tokens that were only brought to unit variance."""
    rows, search = searchable(codec.spec)
    z = np.array(hadamard.inverse(mx.array(x / np.sqrt((x**2).mean(-1, keepdims=True)))))
    seen = mx.array(np.abs(z) if search.magnitude else z).reshape(-1, 8)
    code = np.array(rows[search(seen)]).reshape(z.shape)
    return np.array(hadamard.forward(mx.array(np.where(search.magnitude & (z < 0), -code, code))))


@pytest.mark.parametrize(("bits", "margin"), [(2, 0.038), (1, 0.110)])
@pytest.mark.parametrize("options", [SEED, {}])
def test_nsn_is_what_helps(bits, margin, options):
    """With a strong channel bias it gains the margin; without any it gains nothing."""
    codec = NSNQuant(bits=bits, **options)
    bias = 4 * np.random.default_rng(9).standard_normal(128).astype(np.float32)
    for x, low, high in (
        (normal(1, 4, 256, 128) + bias, margin, 1),
        (normal(1, 4, 256, 128), -0.005, 0.006),
    ):
        gain = cosine(x, there_and_back(codec, x)) - cosine(x, without_nsn(codec, x))
        assert low < gain < high


@pytest.mark.parametrize("bits", [1, 2])
def test_what_fold_corrects_for(bits):
    x = normal(1, 2, 64, 128)
    y = {f: there_and_back(NSNQuant(bits=bits, fold=f), x) for f in ("norm", "least", "orthogonal")}
    error = {f: ((x - y[f]) ** 2).mean() for f in y}
    assert error["least"] < error["norm"] < error["orthogonal"]
    lengths = np.linalg.norm(y["norm"], axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(lengths.mean(), 1, atol=0.02)
    np.testing.assert_allclose(((x - y["orthogonal"]) * x).sum(-1).mean() / 128, 0, atol=0.02)


def hard_cases() -> dict[str, np.ndarray]:
    x = normal(1, 2, 64, 64)
    cases = {name: x.copy() for name in ("zeros between", "opposite", "giant", "tiny but one")}
    cases["zeros between"][:, :, ::3] = 0
    cases["opposite"][:, :, 1::2] = -x[:, :, ::2]
    cases["giant"][:, :, 7] *= 1.5e4
    cases["tiny but one"][:, :, 1:] *= 1e-6
    cases["one channel"] = np.where(np.arange(64) == 5, 3.0, np.zeros_like(x))
    cases["one token"] = np.where(np.arange(64)[:, None] == 5, x, 0)
    cases["a token each"] = np.broadcast_to(np.eye(64), x.shape) * 10
    return cases | {
        "zeros": 0 * x, "ones": 0 * x + 1, "tiny": 1e-6 * x, "nothing": 1e-9 * x,
        "small": 1e-4 * x, "large": np.clip(3e4 * x, -65504, 65504),
    }  # fmt: skip


@pytest.mark.parametrize("name", hard_cases())
@pytest.mark.parametrize("options", [{}, {"bits": 1}, {"fit": "nsn"}, FINE, SEED])
def test_hard_cases(name, options):
    x = hard_cases()[name].astype(np.float32)
    y = there_and_back(NSNQuant(**options), x)
    assert np.isfinite(y).all()
    error = ((x - y) ** 2).sum() / max((x**2).sum(), 1e-30)
    assert error < (1.01 if name in ("nothing", "tiny") else 0.75 if "bits" in options else 0.25)
    if name in ("zeros", "ones"):
        np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("options", [{}, {"fit": "nsn"}, FINE, SEED])
def test_values_that_f16_scales_cannot_hold(value, options):
    x = normal(1, 2, 64, 64)
    x[0, 1, 3, 5] = value
    with pytest.raises(CodecError) as error:
        NSNQuant(**options).encode(mx.array(x))
    assert error.value.rule == "N3"


# --- parameters, forms, hostile parts ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", 3), ("bits", 2.0), ("bits", True), ("window", 1), ("window", 65537),
        ("window", "64"), ("metadata_bits", 8), ("codebook_size", 1), ("codebook_size", 257),
        ("subvector_dim", 2), ("subvector_dim", 7), ("pre_rope", 1), ("match", "dot"),
        ("fit", ""), ("fold", "none"), ("seed", -1), ("seed", 1 << 63), ("seed", True),
    ],
)  # fmt: skip
def test_n1_parameters(name, value):
    with pytest.raises(CodecError) as error:
        NSNQuant(**{name: value})
    assert error.value.rule == "N1"
    assert str(error.value).startswith(f"nsnquant.{name}: {value!r} is not ")


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((1, 1, 64, 100), {}, "head dim 100 is not m * 2^k with m in (1, 12, 20, 28)"),
        ((1, 1, 64, 576), {}, "head dim 576 is not m * 2^k with m in (1, 12, 20, 28)"),
        ((1, 1, 64, 36), FINE, "head dim 36 is not m * 2^k with m in (1, 12, 20, 28)"),
        ((1, 1, 64, 16384), {}, "head dim 16384 is not m * 2^k with m in (1, 12, 20, 28)"),
        ((1, 1, 64, 0), {}, "head dim 0 is not m * 2^k with m in (1, 12, 20, 28)"),
        ((1, 1, 64, 80), {}, "head dim 80 is not a multiple of 32"),
        ((1, 1, 64, 12), FINE, "head dim 12 is not a multiple of 8"),
        ((1, 1, 64, 24), {**FINE, "subvector_dim": 16}, "head dim 24 is not a multiple of 16"),
        ((64, 128), {}, "shape (64, 128) is not (B, H, T, D)"),
    ],
)
def test_n2_shapes(shape, options, reason):
    codec = NSNQuant(**options)
    assert codec.refuses(shape, mx.float16) == reason
    with pytest.raises(CodecError) as error:
        codec.layout(shape)
    assert str(error.value) == f"nsnquant: {reason} [N2]"


def test_n2_tokens():
    assert "int32" in NSNQuant().refuses((1, 1, 64, 64), mx.int32)
    for shape in ((1, 1, 65, 64), (1, 1, 0, 64), (0, 1, 64, 64)):
        with pytest.raises(CodecError, match="in windows of 64") as error:
            NSNQuant().encode(mx.zeros(shape))
        assert error.value.rule == "N2"


SHAPE = (1, 1, 64, 64)


@pytest.mark.parametrize("name", ["s2", "s1_range", "o_range", "codebook"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_n3_scalars_that_are_not_finite(name, value):
    parts = NSNQuant().encode(mx.array(normal(*SHAPE)))
    bad = np.array(parts[name])
    bad.flat[-1] = value
    with pytest.raises(CodecError) as error:
        NSNQuant().validate(parts | {name: mx.array(bad)}, SHAPE)
    assert (error.value.rule, error.value.at) == ("N3", name)


def test_n4_indices_beyond_the_codebook():
    codec = NSNQuant(codebook_size=16, subvector_dim=4)
    parts = codec.encode(mx.array(normal(*SHAPE)))
    bad = mx.where(mx.arange(16) == 3, 16, parts["indices"]).astype(mx.uint8)
    with pytest.raises(CodecError, match="index 16, expected less than 16") as error:
        codec.validate(parts | {"indices": bad}, SHAPE)
    assert (error.value.rule, error.value.at) == ("N4", "indices")


def test_defaults_for_keys_and_values():
    assert NSNQuant.configure({}, "keys", "F16") == NSNQuant()
    assert NSNQuant.configure({}, "values", "F16") == NSNQuant(pre_rope=False)
    assert NSNQuant.configure({"pre_rope": True}, "values", "F16") == NSNQuant(pre_rope=False)
    options = {"match": "cosine", "metadata_bits": 16, "pre_rope": False}
    assert NSNQuant.configure(options, "keys", "F16") == NSNQuant(**SEED)
    assert NSNQuant.configure({**options, "fold": "least"}, "keys", "F16").fold == "least"


def test_header_params_build_the_same_codec():
    text = {"bits": "1", "match": "cosine", "metadata_bits": "16", "pre_rope": "false"}
    codec = NSNQuant.configure(parse_options(NSNQuant, text), "keys", "BF16")
    assert codec == NSNQuant(bits=1, **SEED)
    assert build(NSNQuant, asdict(codec)) == codec
    assert codec.roles.keys() >= codec.layout((1, 1, 64, 64)).keys()


@pytest.mark.parametrize("options", [{}, {"bits": 1}, FINE, {"window": 6}])
def test_any_parts_that_pass_decode_to_finite_values(options):
    codec = NSNQuant(**options)
    shape = (1, 2, 2 * codec.window, 64)
    rng = np.random.default_rng(4)
    for _ in range(20):
        parts = {}
        for name, (dtype, form) in codec.layout(shape).items():
            size = {"U8": 1, "F16": 2, "U32": 4}[dtype] * int(np.prod(form))
            raw = np.frombuffer(rng.bytes(size), {"U8": "u1", "F16": "<f2", "U32": "<u4"}[dtype])
            raw = np.where(np.isfinite(raw), raw, 65504) if dtype == "F16" else raw
            parts[name] = mx.array(raw.reshape(form))
        codec.validate(parts, shape)
        for dtype in (mx.float16, mx.bfloat16, mx.float32):
            assert mx.isfinite(codec.decode(parts, shape, dtype)).all()
