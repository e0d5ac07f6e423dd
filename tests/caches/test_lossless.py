"""Caches saved with `lossless`: every bit comes back, growth is added, odd tensors too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm

import vkv


def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype("f4")).astype(dtype)


def filled(tokens: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> Any:
    cache = mlx_lm.KVCache()
    keys, values = (normal(1, 2, tokens, 64, dtype=dtype, seed=seed + i) for i in (0, 1))
    cache.update_and_fetch(keys, values)
    return cache


def words(x: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(x).view(mx.uint8))


def assert_same(a: Any, b: Any) -> None:
    assert a.offset == b.offset
    for x, y in ((a.keys, b.keys), (a.values, b.values)):
        assert x.dtype == y.dtype
        x, y = x[..., : a.offset, :], y[..., : a.offset, :]
        np.testing.assert_array_equal(words(x), words(y))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_cache_comes_back(tmp_path: Path, dtype: mx.Dtype):
    cache = [filled(700, dtype, seed) for seed in (0, 2)]
    vkv.save(tmp_path / "raw.vkv", cache, codec="raw")
    vkv.save(tmp_path / "x.vkv", cache, codec="lossless")
    for a, b in zip(cache, vkv.load(tmp_path / "x.vkv").cache, strict=True):
        assert_same(a, b)
    assert vkv.validate(tmp_path / "x.vkv", deep=True).ok
    size = {name: (tmp_path / f"{name}.vkv").stat().st_size for name in ("raw", "x")}
    assert size["x"] < 0.87 * size["raw"]


def test_special_values_come_back(tmp_path: Path):
    cache = filled(300)
    odd = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80, 0xFF80], np.uint16)
    cache.keys[0, 1, 7, :6] = mx.array(odd).view(mx.bfloat16)
    vkv.save(tmp_path / "x.vkv", [cache], codec="lossless")
    assert_same(cache, vkv.load(tmp_path / "x.vkv").cache[0])


def test_recurrent_state_and_latents_are_coded_too(tmp_path: Path):
    """An error in them would spread; here there is none. Integers stay raw."""
    arrays = mlx_lm.ArraysCache(2, left_padding=[2])
    arrays[0] = normal(1, 3, 600)
    arrays[1] = normal(1, 8, 64, 16, dtype=mx.float32)
    latent = mlx_lm.KVCache()
    latent.update_and_fetch(normal(1, 1, 300, 64), normal(1, 1, 300, 32))
    vkv.save(tmp_path / "x.vkv", [arrays, latent], codec="lossless")
    layers = vkv.inspect(tmp_path / "x.vkv").header.layers
    used = {
        f"{i}.{name}": tensor.segments[0].codec
        for i, layer in enumerate(layers)
        for name, tensor in layer.tensors.items()
    }
    lossless = dict.fromkeys(("0.0", "0.1", "1.keys", "1.values"), "lossless")
    assert used == lossless | {"0.left_padding": "raw"}
    assert layers[0].tensors["left_padding"].note
    found = vkv.load(tmp_path / "x.vkv").cache
    assert_same(latent, found[1])
    for a, b in zip(arrays.cache, found[0].cache, strict=True):
        np.testing.assert_array_equal(words(a), words(b))


def test_what_a_conversation_added_is_all_that_is_written(tmp_path: Path):
    cache, ids = filled(2000), list(range(2100))
    vkv.save(tmp_path / "a.vkv", [cache], tokens=ids[:2000], codec="lossless")
    cache.update_and_fetch(normal(1, 2, 100, 64, seed=8), normal(1, 2, 100, 64, seed=9))
    vkv.save(tmp_path / "b.vkv", [cache], tokens=ids, codec="lossless", parent=tmp_path / "a.vkv")
    assert (tmp_path / "b.vkv").stat().st_size < 0.15 * (tmp_path / "a.vkv").stat().st_size
    assert_same(cache, vkv.load(tmp_path / "b.vkv").cache[0])


def test_a_parent_of_other_bits_is_not_referred_to(tmp_path: Path):
    """Of equal tokens and equal values, a zero with another sign is still another."""
    cache, other = filled(600), filled(600)
    cache.keys[0, 0, 3, 5] = mx.array(0.0)
    other.keys[0, 0, 3, 5] = mx.array(-0.0)
    ids = list(range(600))
    vkv.save(tmp_path / "a.vkv", [cache], tokens=ids, codec="lossless")
    vkv.save(tmp_path / "b.vkv", [other], tokens=ids, codec="lossless", parent=tmp_path / "a.vkv")
    assert_same(other, vkv.load(tmp_path / "b.vkv").cache[0])


def test_raw_files_are_converted_and_back(tmp_path: Path):
    cache = filled(500)
    raw, packed, again = (tmp_path / f"{name}.vkv" for name in "abc")
    vkv.save(raw, [cache], tokens=list(range(500)), codec="raw")
    vkv.save(packed, vkv.load(raw).cache, tokens=list(range(500)), codec="lossless")
    vkv.save(again, vkv.load(packed).cache, tokens=list(range(500)), codec="raw")
    assert again.read_bytes() == raw.read_bytes()
