"""``vkv.load_prompt_cache`` of a file that mlx-lm wrote."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    save_prompt_cache,
)

import vkv


def _filled(cache, rows):
    x = mx.random.normal((1, 2, rows, 8))
    cache.update_and_fetch(x, x + 1)
    return cache


def test_caches_and_metadata_are_those_that_mlx_lm_saved(tmp_path):
    path = str(tmp_path / "chat.safetensors")
    saved = [_filled(KVCache(), 5), _filled(RotatingKVCache(max_size=16), 7)]
    save_prompt_cache(path, [*saved, CacheList(*saved)], {"user": "text"})
    caches, metadata = vkv.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"user": "text"}
    for old, new in zip(saved * 2, [*caches[:2], *caches[2].caches], strict=True):
        assert type(new) is type(old)
        assert new.offset == old.offset
        for a, b in zip(old.state[:2], new.state[:2], strict=True):
            assert mx.array_equal(a[..., : old.offset, :], b[..., : old.offset, :])


def test_a_quantized_cache_keeps_its_codes(tmp_path):
    path = str(tmp_path / "chat.safetensors")
    saved = QuantizedKVCache(group_size=64, bits=4)
    x = mx.random.normal((1, 2, 10, 64))
    saved.update_and_fetch(x, x + 1)
    save_prompt_cache(path, [saved])
    (new,) = vkv.load_prompt_cache(path)
    assert (type(new), new.offset, new.bits, new.group_size) == (QuantizedKVCache, 10, 4, 64)
    for old, own in ((saved.keys, new.keys), (saved.values, new.values)):
        for a, b in zip(old, own, strict=True):
            assert mx.array_equal(a[..., :10, :], b[..., :10, :])
    more = mx.random.normal((1, 2, 1, 64))
    saved.update_and_fetch(more, more)
    new.update_and_fetch(more, more)
    assert mx.array_equal(saved.keys[0][..., :11, :], new.keys[0][..., :11, :])


def test_a_text_is_refused_as_no_vkv_file(tmp_path):
    (tmp_path / "a.txt").write_text("just a text, longer than a few bytes")
    with pytest.raises(vkv.VkvError, match="not a vkv file"):
        vkv.load_prompt_cache(tmp_path / "a.txt")
