"""The faster ways to decode and to search, against plain MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vkv.caches.rope import rotate
from vkv.codecs.kernels import cuda as kernels_cuda
from vkv.codecs.kernels.device import on_cuda
from vkv.codecs.kvquant.codec import KvQuant
from vkv.codecs.nsnquant import kernels_cpu
from vkv.codecs.nsnquant.codec import NSNQuant
from vkv.codecs.nsnquant.searchable import searchable
from vkv.codecs.protocol import FusedContext
from vkv.format.schema import Rope

#: Half a step of the cast, and what the sums before it may differ by.
STEP = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-20}
DTYPES = pytest.mark.parametrize("dtype", STEP, ids=lambda d: str(d).rpartition(".")[2])


def normal(*shape: int, scale: float = 1) -> mx.array:
    rng = np.random.default_rng(0)
    return mx.array((scale * (1 + rng.standard_normal(shape))).astype(np.float32))


def plain(codec: NSNQuant, parts: dict[str, mx.array], shape, dtype) -> mx.array:
    """Decoded by plain operations alone."""
    flat = {n: p.reshape(-1, *p.shape[3:]) for n, p in parts.items() if n != "codebook"}
    count = shape[0] * shape[1] * shape[2] // codec.window
    flat = {n: p.reshape(count, -1) for n, p in flat.items()}
    rows = parts["codebook"].astype(mx.float32)
    return codec.plain(flat, rows, shape[-1], dtype).reshape(shape)


def check(got: mx.array, want: mx.array, tiny: float = 0) -> None:
    assert got.dtype == want.dtype
    a, b = (np.array(x.astype(mx.float32)) for x in (got, want))
    # A step of the cast, where the values before it lie on two sides of a tie.
    top = np.abs(b).max(-1, keepdims=True)
    np.testing.assert_array_less(
        np.abs(a - b), 2 * STEP[got.dtype] * np.abs(b) + 2.0**-20 * top + tiny + 1e-30
    )


@DTYPES
@pytest.mark.parametrize(
    ("options", "dim"),
    [
        *(({"bits": bits}, dim) for bits in (1, 2) for dim in (32, 64, 96, 128, 160, 224)),
        ({"metadata_bits": 16}, 8),
        ({"window": 6, "metadata_bits": 16}, 64),
        ({"codebook_size": 7}, 64),
        ({"window": 700, "match": "cosine"}, 128),
    ],
)
def test_cpu_tables_decode_as_plain_operations(options, dim, dtype):
    codec = NSNQuant(**options)
    shape = (2, 1, 2 * codec.window, dim)
    assert kernels_cpu.fits(dim, 8)
    parts = codec.encode(normal(*shape))
    check(codec.decode(parts, shape, dtype), plain(codec, parts, shape, dtype))


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 6e4])
def test_cpu_tables_at_the_ends_of_float16(scale):
    """Subnormal numbers, and rule N5: nothing becomes infinite."""
    codec, shape = NSNQuant(), (1, 1, 64, 64)
    parts = codec.encode(mx.clip(normal(*shape, scale=scale), -65504, 65504))
    got = codec.decode(parts, shape, mx.float16)
    check(got, plain(codec, parts, shape, mx.float16), tiny=2.0**-24)
    assert (mx.abs(got).max().item() == 65504) == (scale > 1)


@pytest.mark.parametrize(("dim", "subvector"), [(24, 8), (40, 8), (128, 4), (128, 16), (136, 8)])
def test_other_sizes_are_left_to_plain_operations(dim, subvector):
    assert not kernels_cpu.fits(dim, subvector)


# --- CUDA: ``make bench-gpu`` runs these first ---

cuda = pytest.mark.skipif(not on_cuda(), reason="needs an NVIDIA GPU")
ROPES = [
    Rope(dims=128, base=5e5),
    Rope(dims=64, base=1e4, scale=0.25, traditional=True, mscale=1.25),
    Rope(dims=32, freqs=tuple(float(1 + i) for i in range(16))),
]


def equal(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


#: A kernel is compiled for each combination, so only some are tried.
NSNQUANT = [
    *(({}, dim, dtype) for dim in (32, 64, 128, 256) for dtype in STEP),
    *(
        (options, 128, mx.bfloat16)
        for options in ({"bits": 1}, {"metadata_bits": 16}, {"window": 6}, {"codebook_size": 9})
    ),
]
KVQUANT = [
    *((bits, dim, "channel", 0.01, mx.bfloat16) for bits in (2, 3, 4) for dim in (64, 80, 256)),
    *((3, 128, table, 0.01, dtype) for table in ("channel", "token", "shared") for dtype in STEP),
    *((3, 128, "channel", fraction, mx.float16) for fraction in (0.0, 0.0005, 0.4)),
]


@cuda
@pytest.mark.parametrize(("options", "dim", "dtype"), NSNQUANT, ids=str)
def test_cuda_decodes_nsnquant_to_the_bits_of_plain_operations(options, dim, dtype):
    codec = NSNQuant(**options)
    shape = (2, 3, 10 * codec.window, dim)
    parts = codec.encode(normal(*shape))
    got = kernels_cuda.nsnquant(parts, shape, dtype, codec.window)
    assert got is not None
    assert equal(got, plain(codec, parts, shape, dtype))


@cuda
@pytest.mark.parametrize(("bits", "dim", "table", "fraction", "dtype"), KVQUANT, ids=str)
def test_cuda_decodes_kvquant_to_the_bits_of_plain_operations(bits, dim, table, fraction, dtype):
    codec = KvQuant(bits=bits, table=table, outlier_fraction=fraction)
    shape = (2, 3, 200, dim)
    parts = codec.encode(normal(*shape, scale=30))
    codec.validate(parts, shape)
    got = kernels_cuda.kvquant(parts, shape, dtype, bits, table)
    assert got is not None
    assert equal(got, codec.plain(parts, shape, dtype))


@cuda
@pytest.mark.parametrize("codec", [NSNQuant(), KvQuant()], ids=["nsnquant", "kvquant"])
@pytest.mark.parametrize(
    ("head", "tail", "rope", "dtype"),
    [
        *((5, 63, rope, mx.bfloat16) for rope in (None, *ROPES)),
        *((head, tail, ROPES[0], mx.float16) for head, tail in ((0, 0), (0, 7), (1, 0), (1, 9))),
        (1, 9, ROPES[0], mx.float32),
    ],
    ids=str,
)
def test_cuda_writes_what_surrounds_the_codes(head, tail, codec, rope, dtype):
    x = normal(2, 2, head + 192 + tail, 128).astype(dtype)
    before, middle, after = mx.split(x, [head, head + 192], axis=2)
    parts = codec.encode(middle.astype(mx.float32))
    frame = FusedContext(before, after, rope)
    got = codec.decode_fused(parts, middle.shape, dtype, frame)
    want = codec.decode(parts, middle.shape, dtype)
    if rope is not None:
        want = rotate(want, rope, head, dtype=dtype)
    want = mx.concatenate([before, want, after], axis=2)
    if rope is None:
        assert equal(got, want)
    else:
        check(got, want)


@cuda
def test_cuda_leaves_other_sizes_to_plain_operations():
    shape = (1, 1, 64, 96)
    parts = NSNQuant().encode(normal(*shape))
    assert kernels_cuda.nsnquant(parts, shape, mx.float16, 64) is None
    wide = mx.zeros((1, 600, 1, 128))
    parts = {"codes": wide, "levels": wide}
    assert kernels_cuda.kvquant(parts, wide.shape, mx.float32, 4, "token") is None


@cuda
@pytest.mark.parametrize("options", [{"bits": 1}, {"bits": 2}, {"match": "cosine"}], ids=str)
@pytest.mark.parametrize("dim", [4, 8, 16])
def test_cuda_finds_the_same_codewords(options, dim):
    _, search = searchable(NSNQuant(subvector_dim=dim, **options).spec)
    x = mx.abs(normal(5001, dim, scale=2)) if search.magnitude else normal(5001, dim, scale=2)
    assert equal(search(x), search.plain(x))
