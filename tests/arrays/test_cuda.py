"""Bytes between an NVIDIA GPU and files; only the fallback where there is none."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import vkv
from vkv.arrays import cuda
from vkv.arrays.host_bytes import digest
from vkv.format.document import open_document

gpu = pytest.mark.skipif(cuda.device() is None, reason="no NVIDIA GPU that MLX computes on")
SHAPES = [(3,), (1, 2, 5, 64), (cuda.STAGE + 4,), (2, cuda.STAGE)]


def numbers(shape: tuple[int, ...]) -> mx.array:
    return mx.random.randint(0, 255, shape, key=mx.random.key(0)).astype(mx.uint8)


def test_without_a_gpu_arrays_are_read_where_they_are():
    with mx.stream(mx.cpu):
        assert cuda.device() is None or mx.default_device() == mx.Device(mx.gpu)
    assert digest(mx.zeros((2, 0))) == digest(mx.zeros((0,)))


@gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_come_as_they_are(shape):
    x = numbers(shape)
    found = b"".join(bytes(piece) for piece in cuda.Bytes(cuda.device(), x))
    assert found == np.array(x).tobytes()


@gpu
def test_bytes_of_a_part_start_where_it_does():
    x = numbers((8, 4096))
    part = x[3:5]
    found = b"".join(bytes(piece) for piece in cuda.Bytes(cuda.device(), part))
    assert found == np.array(x)[3:5].tobytes()


@gpu
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_cache_comes_back_bit_for_bit(tmp_path, dtype):
    cache = KVCache()
    keys, values = mx.random.normal((2, 1, 4, 9000, 128)).astype(dtype)
    cache.update_and_fetch(keys, values)
    vkv.save(tmp_path / "a.vkv", [cache], tokens=range(9000))
    (found,) = vkv.load(tmp_path / "a.vkv").cache
    assert mx.array_equal(found.keys, keys)
    assert mx.array_equal(found.values, values)
    with mx.stream(mx.cpu):
        assert vkv.validate(tmp_path / "a.vkv", deep=True).ok


@gpu
def test_every_dtype_and_a_number_come_back(tmp_path):
    for path in sorted((Path(__file__).parents[2] / "fixtures/v1/good").glob("raw-*.vkv")):
        before = vkv.load(path)
        vkv.save(tmp_path / "a.vkv", before.cache, tokens=before.tokens)
        with open_document(path) as old, open_document(tmp_path / "a.vkv") as new:
            digests = [{t.digest for t in d.header.tensors.values()} for d in (old, new)]
        assert digests[0] == digests[1], path


@gpu
def test_damage_is_found(tmp_path):
    cache = KVCache()
    cache.update_and_fetch(*mx.random.normal((2, 1, 4, 9000, 128)))
    vkv.save(tmp_path / "a.vkv", [cache])
    data = bytearray((tmp_path / "a.vkv").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.vkv").write_bytes(data)
    with pytest.raises(vkv.VkvError) as caught:
        vkv.load(tmp_path / "a.vkv")
    assert caught.value.rule == "D1"
