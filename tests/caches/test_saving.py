"""Save what was loaded: the same bytes; and what a codec cannot take: named, or stored raw."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.errors import CodecError

CODECS = ["raw", "affine:bits=4", "nsnquant:bits=2", "kvquant:bits=3", "tc:step=0.5"]
each_codec = pytest.mark.parametrize("codec", CODECS)


def filled(tokens: int = 150):
    model = tiny.llama(head_dim=64)
    ids = [(37 * i + 11) % tiny.VOCAB for i in range(tokens)]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    return model, cache, ids


@each_codec
@pytest.mark.parametrize("live", ["dense", "packed"])
def test_save_load_save_gives_the_same_bytes(codec, live, tmp_path):
    model, cache, ids = filled()
    for name in ("a", "b", "c"):
        asked = "raw" if name == "c" else codec  # raw keeps the codes too
        vkv.save(tmp_path / f"{name}.vkv", cache, tokens=ids, model=model, codec=asked)
        cache = vkv.load(tmp_path / f"{name}.vkv", model=model, live=live).cache
    first = (tmp_path / "a.vkv").read_bytes()
    assert (tmp_path / "b.vkv").read_bytes() == first
    assert (tmp_path / "c.vkv").read_bytes() == first


def infinite_at(row: int, layers: int = 3, bad: int = 1):
    cache = [KVCache() for _ in range(layers)]
    for i, layer in enumerate(cache):
        keys, values = (
            mx.random.normal((1, 2, 100, 64), key=mx.random.key(2 * i + j)) for j in (0, 1)
        )
        if i == bad:
            keys[0, 1, row, 5] = float("inf")
        layer.update_and_fetch(keys, values)
    return cache


def test_a_sink_that_is_not_finite_is_stored_raw(tmp_path):
    cache = infinite_at(2)
    vkv.save(tmp_path / "a.vkv", cache, codec="tc:step=0.5")
    keys = vkv.load(tmp_path / "a.vkv").cache[1].keys
    assert mx.array_equal(keys[..., :4, :], cache[1].keys[..., :4, :])
    assert mx.isfinite(keys[..., 4:, :]).all()


@pytest.mark.parametrize("codec", ["tc:bits=6", "tc:step=0.5", "nsnquant:bits=2"])
def test_what_a_codec_refuses_is_named(codec, tmp_path):
    with pytest.raises(CodecError) as caught:
        vkv.save(tmp_path / "a.vkv", infinite_at(50), codec=codec)
    assert (caught.value.at or "").startswith("layers.1.keys")
    assert not (tmp_path / "a.vkv").exists()
