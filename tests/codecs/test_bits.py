"""Bit streams, against ``numpy.packbits``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkv.codecs.bits import pack, unpack, words

COUNTS = (1, 5, 7, 8, 9, 31, 32, 33, 64, 100, 128)


def codes_of(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape).astype(np.uint8)


def stream_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """The stream as the page defines it, bit by bit."""
    row = ((codes[..., None] >> np.arange(bits)) & 1).reshape(*codes.shape[:-1], -1)
    padded = np.pad(row.astype(np.uint8), [(0, 0)] * (row.ndim - 1) + [(0, -row.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_there_and_back(bits, count):
    codes = codes_of(bits, 3, 2, count)
    stream = pack(mx.array(codes), bits)
    assert stream.dtype == mx.uint32
    assert stream.shape == (3, 2, words(count, bits))
    np.testing.assert_array_equal(np.array(stream), stream_of(codes, bits))
    np.testing.assert_array_equal(np.array(unpack(stream, bits, count)), codes)


@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_size(bits, count, rows):
    codes = codes_of(bits, rows, count)
    stream = pack(mx.array(codes), bits)
    np.testing.assert_array_equal(np.array(stream), stream_of(codes, bits))
    np.testing.assert_array_equal(np.array(unpack(stream, bits, count)), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_views_that_are_not_contiguous(bits):
    codes = mx.array(codes_of(bits, 64, 6, 32))
    seen = codes[::2, 1:5].swapaxes(0, 1)
    stream = pack(seen, bits)
    np.testing.assert_array_equal(np.array(stream), stream_of(np.array(seen), bits))
    back = unpack(stream.swapaxes(0, 1), bits, 32).swapaxes(0, 1)
    np.testing.assert_array_equal(np.array(back), np.array(seen))


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16, mx.int32, mx.uint32])
def test_only_the_low_bits_of_a_code_are_kept(dtype):
    codes = mx.array([5, 6, 7, 8, 15, 16, 31, 100], dtype=dtype)
    assert unpack(pack(codes, 3), 3, 8).tolist() == [c & 7 for c in codes.tolist()]


def test_the_first_codes_alone():
    codes = codes_of(3, 2, 64)
    stream = pack(mx.array(codes), 3)
    for count in (1, 8, 10, 11, 63):
        np.testing.assert_array_equal(np.array(unpack(stream, 3, count)), codes[:, :count])


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_codes(bits):
    assert pack(mx.zeros((2, 0), mx.uint8), bits).shape == (2, 0)
    assert unpack(mx.zeros((2, 0), mx.uint32), bits, 0).shape == (2, 0)
    assert unpack(pack(mx.zeros((0, 32), mx.uint8), bits), bits, 32).shape == (0, 32)


def test_an_example():
    """Codes 1, 2, 3 of 3 bits: 1 + 2 * 8 + 3 * 64."""
    assert pack(mx.array([1, 2, 3], dtype=mx.uint8), 3).tolist() == [1 + 2 * 8 + 3 * 64]
