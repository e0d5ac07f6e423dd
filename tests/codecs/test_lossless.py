"""`lossless`: every bit comes back, in fewer bytes, and damaged codes raise only CodecError."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import lossless as reference
from vkv.codecs import threads
from vkv.codecs.lossless import channels, frames, planes, records, tensor
from vkv.codecs.lossless.codec import Lossless, is_smaller
from vkv.codecs.protocol import DTYPES, Parts
from vkv.errors import CodecError

WORDS = {"BF16": mx.uint16, "F16": mx.uint16, "F32": mx.uint32}
KINDS = sorted(WORDS)


def normal(*shape: int, dtype: str = "BF16", seed: int = 0) -> mx.array:
    """Normal values, channels of sizes from 1/8 to 8, some of them off centre."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + rng.choice([-3, 0, 0, 3], shape[-1])
    return mx.array((x * 2.0 ** rng.integers(-3, 4, shape[-1])).astype("f4")).astype(DTYPES[dtype])


def noise(*shape: int, dtype: str, seed: int = 0) -> mx.array:
    """Every bit random: NaN payloads, infinities, subnormal numbers and both zeros."""
    high = 1 << (32 if dtype == "F32" else 16)
    bits = np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint32)
    return mx.array(bits).astype(WORDS[dtype]).view(DTYPES[dtype])


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


def codec_of(x: mx.array, **options: int) -> Lossless:
    dtype = next(name for name in WORDS if DTYPES[name] == x.dtype)
    return Lossless(dtype=dtype, **options)


def rate(x: mx.array, **options: int) -> float:
    return 8 * codec_of(x, **options).encode(x)["codes"].nbytes / x.size


def check(x: mx.array, **options: int) -> Parts:
    """Encode, and compare what comes back with ``x`` and with the reference."""
    codec = codec_of(x, **options)
    parts = codec.encode(x)
    codec.validate(parts, x.shape)
    got = codec.decode(parts, x.shape, x.dtype)
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(bits(got), bits(x))
    want = reference.bits(bytes(np.array(parts["codes"])), codec.dtype, x.shape)
    np.testing.assert_array_equal(want, bits(x))
    return parts


@pytest.fixture
def short_records(monkeypatch):
    """Records of few elements."""
    monkeypatch.setattr(tensor, "MIN_ELEMENTS", 1 << 14)


# --- every bit ---

SHAPES = [(1, 2, 300, 16), (2, 3, 70, 5), (1, 1, 1, 1), (1, 2, 1, 64), (7,), (5, 3), (2, 3, 4),
          (1, 3, 40, 7, 2), (1, 1, 700, 129)]  # fmt: skip


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_bits_come_back(dtype, shape):
    check(noise(*shape, dtype=dtype))
    check(normal(*shape, dtype=dtype), groups=3)


@pytest.mark.parametrize("dtype", KINDS)
def test_all_words_of_16_bits_come_back(dtype):
    words = np.arange(1 << 16, dtype=np.uint32).reshape(1, 2, -1, 64)
    words = words if dtype != "F32" else words << 16 | 0x8001
    check(mx.array(words).astype(WORDS[dtype]).view(DTYPES[dtype]))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("nan"), 1e-40, -3.5])
@pytest.mark.parametrize("dtype", KINDS)
def test_equal_values_come_back_and_a_reader_takes_them(dtype, value):
    """H10: a byte stands for 64 elements at most."""
    x = mx.full((1, 4, 3000, 32), value).astype(DTYPES[dtype])
    assert 64 * check(x)["codes"].nbytes >= x.size
    assert is_smaller(x)


def test_zeros_among_others_come_back():
    x = normal(1, 2, 900, 64)
    check(mx.where(mx.arange(900)[:, None] % 7 == 0, mx.zeros_like(x), x))


def test_tokens_with_a_view_of_another_layout_come_back():
    check(normal(1, 64, 500, 4).swapaxes(1, 3))
    check(normal(1, 2, 600, 64)[..., 100:400, :])


def test_the_other_dtype_is_cast():
    x = normal(1, 2, 100, 16, dtype="F32")
    codec = codec_of(x)
    got = codec.decode(codec.encode(x), x.shape, mx.float16)
    assert mx.array_equal(got, x.astype(mx.float16))


def test_threads_change_nothing(short_records, monkeypatch):
    x = normal(1, 4, 3000, 32)
    alone = codec_of(x).encode(x)
    monkeypatch.setattr(tensor, "ALONE", 0)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    assert mx.array_equal(check(x)["codes"], alone["codes"])


def test_an_error_in_a_thread_is_raised(short_records, monkeypatch):
    monkeypatch.setattr(tensor, "ALONE", 0)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    x = normal(1, 4, 3000, 32)
    codes = np.array(codec_of(x).encode(x)["codes"]).copy()
    codes[len(codes) // 2 :: 7] ^= 1
    with pytest.raises(CodecError):
        codec_of(x).decode({"codes": mx.array(codes)}, x.shape, x.dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
    st.integers(1, 40),
)
def test_small_shapes(dtype, shape, seed, record):
    check(noise(*shape, dtype=dtype, seed=seed), record=record)


# --- fewer bytes ---


@pytest.mark.parametrize(("dtype", "most"), [("BF16", 10.75), ("F16", 13.75), ("F32", 26.75)])
def test_rates_of_normal_values(dtype, most):
    """The entropy of a normal BF16 of one deviation is 10.57 bits."""
    assert rate(normal(1, 4, 2048, 64, dtype=dtype)) < most


def test_groups_and_offsets_earn_their_tables():
    x = normal(1, 4, 2048, 64) * 2.0 ** (mx.arange(64) // 4).astype(mx.bfloat16)
    assert rate(x) + 0.3 < rate(x, groups=1) < 11.2


def test_what_was_16_bits_once_is_stored_as_such():
    x = normal(1, 2, 1024, 64)
    assert rate(x.astype(mx.float32)) < rate(x) + 0.05


def test_repeated_tokens_cost_little():
    x = normal(1, 2, 64, 64)
    again = x[:, :, mx.array(np.random.default_rng(0).integers(0, 64, 2048))]
    assert rate(again) < 4


@pytest.mark.parametrize("dtype", KINDS)
def test_noise_is_hardly_larger_than_raw(dtype):
    x = noise(1, 4, 1024, 64, dtype=dtype)
    assert check(x)["codes"].nbytes < 1.001 * x.nbytes
    assert not is_smaller(x)


def test_stored_records_are_cut_and_joined(short_records):
    x = noise(1, 2, 600, 64, dtype="BF16")
    codec = codec_of(x, record=200)
    parts = codec.encode(x)
    cut = codec.prefix(parts, x.shape, 450)
    rest = codec.encode(x[:, :, 450:])
    assert cut is not None
    joined = codec.join([cut, rest])
    assert joined is not None
    np.testing.assert_array_equal(bits(codec.decode(joined, x.shape, x.dtype)), bits(x))


def test_one_token_costs_little_more_than_raw():
    x = normal(1, 8, 1, 128)
    assert check(x)["codes"].nbytes < x.nbytes + 120


def test_is_smaller_of_what_it_cannot_hold():
    assert not is_smaller(mx.arange(10))
    assert not is_smaller(mx.zeros((0, 3)))
    assert is_smaller(normal(1, 2, 4000, 64))
    assert is_smaller(normal(4096))


# --- cut, join, grow ---


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600, 799])
def test_a_prefix_is_the_first_tokens(tokens, short_records):
    x = normal(1, 4, 800, 64)
    codec = codec_of(x, record=256)
    parts = codec.encode(x)
    cut = codec.prefix(parts, x.shape, tokens)
    assert cut is not None
    shape = (1, 4, tokens, 64)
    codec.validate(cut, shape)
    np.testing.assert_array_equal(bits(codec.decode(cut, shape, x.dtype)), bits(x[:, :, :tokens]))
    whole = tokens // 256
    assert scanned(cut)[:whole] == scanned(parts)[:whole]


def scanned(parts: Parts) -> list[tuple[int, bytes]]:
    return [(n, bytes(d)) for n, d in records.scan(memoryview(np.array(parts["codes"])))]


def test_joined_segments_keep_full_records(short_records):
    x = normal(1, 4, 1200, 64)
    codec = codec_of(x, record=300)
    pieces = [
        codec.encode(x[:, :, a:b]) for a, b in ((0, 600), (600, 610), (610, 660), (660, 1200))
    ]
    joined = codec.join(pieces)
    assert joined is not None
    codec.validate(joined, x.shape)
    np.testing.assert_array_equal(bits(codec.decode(joined, x.shape, x.dtype)), bits(x))
    assert [n for n, _ in scanned(joined)] == [300, 300, 60, 300, 240]
    assert scanned(joined)[:2] == scanned(pieces[0])


def test_many_short_segments_join_to_few_records():
    x = normal(2, 2, 400, 64)
    codec = codec_of(x)
    joined = codec.join([codec.encode(x[:, :, t : t + 1]) for t in range(400)])
    assert joined is not None
    np.testing.assert_array_equal(bits(codec.decode(joined, x.shape, x.dtype)), bits(x))
    assert [n for n, _ in scanned(joined)] == [400]
    assert joined["codes"].nbytes == codec.encode(x)["codes"].nbytes


def test_records_have_enough_elements():
    x = normal(1, 1, 20_000, 16)
    assert [n for n, _ in scanned(codec_of(x).encode(x))] == [1 << 14, 20_000 - (1 << 14)]


# --- what is refused ---


@pytest.mark.parametrize(
    "options",
    [{"dtype": "I32"}, {"dtype": "F64"}, {"record": 0}, {"record": 1 << 17}, {"record": 64.0},
     {"groups": 0}, {"groups": 129}, {"groups": True}],
)  # fmt: skip
def test_parameters(options):
    with pytest.raises(CodecError) as exc:
        Lossless(**options)
    assert exc.value.rule == "X1"


def test_configure_takes_the_dtype_of_the_tensor():
    assert Lossless.configure({}, "keys", "F16") == Lossless(dtype="F16")
    assert Lossless.configure({}, "values", "BF16") == Lossless(groups=1)
    assert Lossless.configure({"groups": 2}, "values", "F32") == Lossless(dtype="F32", groups=2)


def test_tensors_that_are_refused():
    codec = Lossless(dtype="F16")
    assert codec.refuses((1, 2, 3, 4), mx.float16) is None
    assert codec.refuses((3,), mx.float16) is None
    assert "I32" in (codec.refuses((1, 2, 3, 4), mx.int32) or "")
    assert "BF16" in (codec.refuses((1, 2, 3, 4), mx.bfloat16) or "")
    assert "elements" in (codec.refuses((1, 0, 3), mx.float16) or "")
    assert "elements" in (codec.refuses((), mx.float16) or "")
    assert "a token" in (codec.refuses((1, 1 << 13, 3, 1 << 13), mx.float16) or "")


def test_another_dtype_or_no_axis_is_not_encoded():
    for x, rule in ((mx.zeros((3, 3)), "X8"), (mx.array(1.0).astype(mx.float16), "X2")):
        with pytest.raises(CodecError) as exc:
            Lossless(dtype="F16").encode(x)
        assert exc.value.rule == rule


X = mx.where(mx.arange(64)[:, None] == 5, mx.zeros((64, 16), mx.bfloat16), normal(1, 2, 64, 16))
CODEC = Lossless()
CODES = bytes(np.array(CODEC.encode(X)["codes"]))


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def sections(data: bytes = CODES) -> list[bytes]:
    """Content of the frames of the one record."""
    found, at = [], records.HEAD
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frame = data[at + 4 : at + 4 + size]
        found.append(frames.expand(frame, frames.content_size(frame)))
        at += 4 + size
    return found


def record(content: list[bytes], tokens: int = 64, tail: bytes = b"") -> bytes:
    """A record of such frames."""
    body = u32(tokens) + CODES[8:11] + b"".join(map(frames.compress, content)) + tail
    body = body.ljust(X.size // 64, b"\0")
    return u32(len(body)) + body


def replaced(index: int, content: bytes) -> bytes:
    found = sections()
    found[index] = content
    return record(found)


def stored(values: bytes) -> bytes:
    """A record of values as they are."""
    body = u32(64) + b"\1\0\0" + frames.compress(values)
    return u32(len(body)) + body


TABLE, SYMBOLS, LOW, ESCAPES = sections()


def frame_with(change: str) -> bytes:
    """The escapes as a frame that is one of Zstandard, but not one that is allowed."""
    size = len(ESCAPES)
    block = (size << 3 | 1).to_bytes(3, "little") + ESCAPES
    head = {
        "no size": b"\x00\x58",  # a window of 2 MiB, and no content size
        "window": b"\x80\xa0" + u32(size),  # of 1 GiB
        "dictionary": b"\xa1\x07" + u32(size),
    }[change]
    return b"\x28\xb5\x2f\xfd" + head + block


def with_frame(frame: bytes) -> bytes:
    body = u32(64) + CODES[8:11] + b"".join(map(frames.compress, (TABLE, SYMBOLS, LOW)))
    body += u32(len(frame)) + frame
    return u32(len(body)) + body


BAD = {
    "X3-no-record": (b"", "X4"),
    "X3-no-tokens": (record(sections(), tokens=0), "X3"),
    "X3-fewer-tokens": (record(sections(), tokens=63), "X3"),
    "X3-twice": (CODES * 2, "X3"),
    "X3-cut": (CODES[:-1], "X3"),
    "X3-head-cut": (CODES + CODES[:7], "X3"),
    "X3-small-size": (u32(3) + CODES[4:], "X3"),
    "X5-no-frame": (record([]), "X5"),
    "X5-size-cut": (record([], tail=b"\1\0"), "X5"),
    "X5-size-zero": (record([], tail=u32(0) + bytes(32)), "X5"),
    "X5-size-huge": (record([], tail=u32((1 << 32) - 1) + b"\0" * 50), "X5"),
    "X5-garbage": (record([], tail=u32(40) + b"\7" * 40), "X5"),
    "X5-short-table": (replaced(0, TABLE[:-1]), "X5"),
    "X5-long-symbols": (replaced(1, SYMBOLS + b"\1"), "X5"),
    "X5-long-low-bits": (replaced(2, LOW + b"\1"), "X5"),
    "X5-odd-escapes": (replaced(3, ESCAPES + b"\1"), "X5"),
    "X5-no-escapes": (record(sections()[:-1]), "X5"),
    "X5-no-content-size": (with_frame(frame_with("no size")), "X5"),
    "X5-large-window": (with_frame(frame_with("window")), "X5"),
    "X5-dictionary": (with_frame(frame_with("dictionary")), "X5"),
    "X5-two-frames": (with_frame(frames.compress(ESCAPES)[4:] * 2), "X5"),
    "X5-damaged": (CODES[:160] + bytes(90) + CODES[250:], "X5"),
    "X6-hole": (replaced(0, TABLE[:32] + b"\1" * 32), "X6"),
    "X9-fewer-escapes": (replaced(3, ESCAPES[2:]), "X9"),
    "X9-more-escapes": (replaced(3, ESCAPES + b"\1\0"), "X9"),
    "X12-kind": (CODES[:8] + b"\2" + CODES[9:], "X12"),
    "X5-stored-short": (stored(bytes(np.array(X.view(mx.uint8)))[1:]), "X5"),
    "X11-tail": (record(sections(), tail=b"\0\0\1"), "X11"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_codes(case):
    data, rule = BAD[case]
    parts = {"codes": mx.array(np.frombuffer(data, np.uint8))}
    with pytest.raises(CodecError) as exc:  # noqa: PT012  # whichever of the two refuses
        CODEC.validate(parts, X.shape)
        CODEC.decode(parts, X.shape, X.dtype)
    assert exc.value.rule == rule


def test_zeros_behind_the_frames_are_allowed():
    parts = {"codes": mx.array(np.frombuffer(record(sections(), tail=bytes(9)), np.uint8))}
    CODEC.validate(parts, X.shape)
    np.testing.assert_array_equal(bits(CODEC.decode(parts, X.shape, X.dtype)), bits(X))


@pytest.mark.parametrize("shape", [(0, 2), (), (1, 0, 3, 4)])
def test_shapes_that_hold_nothing(shape):
    with pytest.raises(CodecError) as exc:
        CODEC.validate(CODEC.encode(X), shape)
    assert exc.value.rule == "X2"


@pytest.mark.parametrize("shape", [(1, 2, 64, 1 << 20), (1, 2, 1 << 40, 16)])
def test_more_elements_than_bytes_can_mean(shape):
    with pytest.raises(CodecError) as exc:
        CODEC.validate(CODEC.encode(X), shape)
    assert exc.value.rule == "X4"


def test_a_frame_that_holds_far_more_than_asked_for_takes_no_memory():
    """1 GB of zeros in 33 kB, for 2 kB of symbols."""
    bomb = with_frame(frames.compress(bytes(1 << 30))[4:])
    parts = {"codes": mx.array(np.frombuffer(bomb, np.uint8))}
    tracemalloc.start()
    with pytest.raises(CodecError):  # noqa: PT012
        CODEC.validate(parts, X.shape)
        CODEC.decode(parts, X.shape, X.dtype)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.hostile
@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(CODES) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_damage_raises_only_codec_errors(at, insert, drop):
    data = CODES[:at] + insert + CODES[at + drop :]
    parts = {"codes": mx.array(np.frombuffer(data, np.uint8))}
    try:
        CODEC.validate(parts, X.shape)
        assert CODEC.decode(parts, X.shape, X.dtype).shape == X.shape
    except CodecError:
        pass


FUZZ = """
import time, numpy as np, mlx.core as mx
from tests.helpers.memory import peak
from vkv.codecs.lossless.codec import Lossless
from vkv.errors import CodecError
r, good, worst = np.random.default_rng(0), [], 0.0
for dtype, kind in (("BF16", mx.bfloat16), ("F16", mx.float16), ("F32", mx.float32)):
    for shape in ((1, 2, 3, 8), (1, 4, 700, 64), (1, 1, 40, 33)):
        x = mx.array(r.standard_normal(shape).astype("f4")).astype(kind)
        codec = Lossless(dtype=dtype)
        good.append((codec, shape, bytes(np.array(codec.encode(x)["codes"]))))
for i in range(3000):
    codec, shape, data = good[r.integers(len(good))]
    data = bytearray(data)
    for _ in range(r.integers(1, 4)):
        at = int(r.integers(min(len(data), 400) if r.integers(2) else len(data)))
        data[at : at + int(r.integers(3))] = r.bytes(int(r.integers(3)))
    parts = {"codes": mx.array(np.frombuffer(bytes(data), np.uint8))}
    start = time.process_time()
    try:
        codec.validate(parts, shape)
        mx.eval(codec.decode(parts, shape, mx.float32))
    except CodecError:
        pass
    worst = max(worst, time.process_time() - start)
print(peak(), worst)
"""


@pytest.mark.hostile
def test_damaged_codes_neither_crash_nor_take_memory():
    """In a process of its own: an abort inside the library would end this one."""
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, worst = done.stdout.split()
    assert int(peak) < 400 << 20
    assert float(worst) < 2


# --- the parts of it ---


def test_clusters_tell_forms_apart():
    forms = np.eye(4, 64, dtype=np.float32) * 100 + 1
    group = channels.cluster(np.repeat(forms, 8, axis=0), 4)
    assert [len(set(group[i : i + 8])) for i in range(0, 32, 8)] == [1] * 4
    assert set(group) == {0, 1, 2, 3}


def test_channels_of_few_tokens_have_one_offset():
    found = channels.choose(np.array(normal(10, 64).view(mx.uint16)), planes.LAYOUTS["BF16"], 8)
    assert not found.delta.any()
    assert not found.group.any()


def test_a_frame_says_its_size():
    framed = frames.compress(b"abc" * 100)
    assert int.from_bytes(framed[:4], "little") == len(framed) - 4
    assert frames.content_size(framed[4:]) == 300
    assert frames.expand(framed[4:], 300) == b"abc" * 100
