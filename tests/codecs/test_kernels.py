"""The faster ways to decode and to search, against plain MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vkv.codecs import kernels_cpu
from vkv.codecs.nsnquant import NSNQuant

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
