"""Caches of mlx-lm's classes: what is stored of them, and what is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

import vkv
from tests.helpers.kinds import CODES, check_same, content, fill, slots
from vkv.errors import CacheError, VkvError


def through_file(tmp_path, cache, **options):
    vkv.save(tmp_path / "a.vkv", [cache], **options)
    return vkv.load(tmp_path / "a.vkv").cache[0]


def test_only_tokens_are_stored(tmp_path):
    info = vkv.save(tmp_path / "a.vkv", [fill(KVCache(), 3, heads=1)])
    assert info.accounting.roles["payload"] == 2 * 3 * 4 * 2
    assert info.header.layers[0].tensors["keys"].shape == (1, 1, 3, 4)


def test_chunked_knows_its_offset(tmp_path):
    loaded = through_file(tmp_path, fill(ChunkedKVCache(8), 12, step=4, front=True))
    assert (loaded.offset, loaded.start_position, loaded.keys.shape[2]) == (12, 4, 8)


def test_loaded_rows_are_no_more_than_stored(tmp_path):
    loaded = through_file(tmp_path, fill(KVCache(), 3))
    assert loaded.nbytes == 2 * 2 * 3 * 4 * 2


def test_mix_of_recurrent_and_attention_layers(tmp_path):
    cache = [fill(KVCache(), 7) if i % 4 == 3 else slots((1, 3, 4), (1, 2)) for i in range(64)]
    info = vkv.save(tmp_path / "a.vkv", cache, tokens=range(7), codec="affine:bits=4,group=32")
    kinds = [layer.kind for layer in info.header.layers]
    assert (kinds.count("arrays"), kinds.count("kv")) == (48, 16)
    for a, b in zip(vkv.load(tmp_path / "a.vkv").cache, cache, strict=True):
        check_same(content(a), content(b))  # head dim 4: nothing could be quantized
    assert info.notes[:2] == [
        "0-2 0: asked for affine:bits=4,group=32, stored raw: recurrent state",
        "0-2 1: asked for affine:bits=4,group=32, stored raw: recurrent state",
    ]


@pytest.mark.parametrize(
    ("heads", "dims", "codec", "reason"),
    [
        (2, (80, 80), "raw", "head dim 80 is not a multiple of group 64"),
        (2, (96, 96), "raw", "head dim 96 is not a multiple of group 64"),
        (2, (100, 100), "raw", "head dim 100 is not a multiple of group 64"),
        (1, (576, 512), "raw", "MLA latents: an error in one reaches every head"),
        (2, (576, 576), "affine", None),
        (2, (192, 128), "affine", None),
    ],
)
def test_head_dims(heads, dims, codec, reason, tmp_path):
    cache = fill(KVCache(), 5, heads=heads, dims=dims)
    info = vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    for name, dim in zip(("keys", "values"), dims, strict=True):
        tensor = info.header.layers[0].tensors[name]
        assert tensor.shape == (1, heads, 5, dim)
        assert [s.codec for s in tensor.segments] == [codec]
        expected = reason and f"asked for affine:bits=4, stored raw: {reason}"
        assert tensor.note == expected
    loaded = vkv.load(tmp_path / "a.vkv").cache[0]
    if codec == "raw":
        check_same(content(loaded), content(cache))


def mixed():
    return [fill(KVCache(), 300), fill(RotatingKVCache(8), 299, 1), slots((1, 3))]


def in_thread(call, *args):
    """What ``call`` returns or raises in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def test_from_another_thread(tmp_path):
    def lazily():
        return vkv.save(tmp_path / "a.vkv", mixed(), codec="affine:bits=4,group=32")

    cache = mixed()
    here = vkv.save(tmp_path / "b.vkv", cache)  # computes it
    there = in_thread(vkv.save, tmp_path / "c.vkv", cache)
    assert here.id == there.id
    assert in_thread(lazily).accounting.adds_up
    for a, b in zip(in_thread(vkv.load, tmp_path / "b.vkv").cache, cache, strict=True):
        check_same(content(a), content(b))


def test_lazy_arrays_of_another_thread_are_refused(tmp_path):
    cache = mixed()  # MLX 0.32 cannot compute it in another thread
    with pytest.raises(CacheError, match=r"call mx.eval on the cache in the thread") as caught:
        in_thread(vkv.save, tmp_path / "a.vkv", cache)
    assert (caught.value.rule, caught.value.at) == ("L2", "layers[0]")
    assert os.listdir(tmp_path) == []
    assert vkv.save(tmp_path / "a.vkv", cache).size  # nothing happened to it


class Sub(KVCache):
    pass


class Stranger:
    """A cache of somebody else's, without ``state``."""

    offset, keys, values = 3, None, None


class Wrapper:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def holding(x):
    cache = ArraysCache(1)
    cache[0] = x
    return cache


def changed(cache=None, **attributes):
    """A filled cache with some attributes of other types or forms than mlx-lm gives them."""
    cache = cache or fill(KVCache(), 3)
    for name, value in attributes.items():
        setattr(cache, name, value)
    return cache


def quantized():
    return fill(QuantizedKVCache(32, 4), 3, **CODES)


def nested(depth):
    cache = KVCache()
    for _ in range(depth):
        cache = CacheList(cache)
    return cache


@pytest.mark.parametrize(
    ("make", "rule", "message"),
    [
        (lambda: fill(Sub(), 3), "L1", r"cannot store a \S*test_kinds\.Sub; known caches are"),
        (Stranger, "L1", r"cannot store a \S*test_kinds\.Stranger;"),
        (lambda: Wrapper(fill(KVCache(), 3)), "L1", r"cannot store a \S*test_kinds\.Wrapper;"),
        (lambda: BatchKVCache([0]), "L1", "BatchKVCache.*extract one sequence of the batch first"),
        (lambda: CacheList(KVCache(), Sub()), "L1", r"test_kinds\.Sub;"),
        (lambda: holding(np.ones(3)), "L2", "ndarray, expected an array"),
        (lambda: holding([1.0]), "L2", "list, expected an array"),
        (lambda: holding(mx.ones((1,) * 9)), "L2", "no file can hold mlx.core.float32"),
        (lambda: changed(keys=mx.ones((1, 1, 3, 4), mx.float64)), "L2", "mlx.core.float64"),
        (lambda: changed(keys=mx.ones((1, 3, 4))), "L2", r"expected \(B, H, T, D\)"),
        (lambda: changed(keys=mx.ones((3,))), "L2", r"expected \(B, H, T, D\)"),
        (lambda: changed(values=None), "L2", r"values: NoneType, expected an array"),
        (lambda: changed(offset=mx.array(3)), "L2", "offset is of type array"),
        (lambda: changed(offset=300), "L5", "256 rows, its scalars say 300"),
        (lambda: changed(offset=-1), "L3", "'offset' is -1, expected a whole number"),
        (lambda: changed(values=mx.ones((1, 1, 3, 4))), "L4", "alike but for D"),
        (lambda: RotatingKVCache(None), "L2", "max_size is of type NoneType"),
        (lambda: changed(quantized(), keys=mx.ones((1, 1, 3, 4))), "L2", "expected three arrays"),
        (lambda: changed(quantized(), keys=(mx.ones(3), None, None)), "L2", r"keys\.codes: \(3,\)"),
        (lambda: changed(quantized(), bits=8), "K3", "expected"),
        (lambda: changed(quantized(), bits=7), "A1", "7 is not one of"),
        (lambda: ArraysCache(65), "L3", "65 slots, the limit is 64"),
        (lambda: nested(5), "L3", "nested deeper than 4 lists"),
        (lambda: changed(ChunkedKVCache(8), start_position=248), "L5", "starts at 248, past"),
        (lambda: None, "L1", "cannot store a builtins.NoneType;"),
    ],
)
def test_one_unsavable_layer_in_eight_and_nothing_is_written(make, rule, message, tmp_path):
    cache = [fill(KVCache(), 3) for _ in range(7)] + [make()]
    with pytest.raises(VkvError, match=message) as caught:
        vkv.save(tmp_path / "a.vkv", cache)
    assert caught.value.rule == rule
    assert str(caught.value).startswith("layers[7]")
    assert os.listdir(tmp_path) == []
