"""The hot paths, timed: ``make bench``. ``make test`` runs each once, untimed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import vkv
from vkv.arrays.cache_file import open_file
from vkv.bench import default_codecs
from vkv.codecs import registry
from vkv.format.container_write import digest

#: Two layers of an 8B shape: 8 KV heads, 512 tokens, head dim 128, fp16; 2 MB each.
LAYERS, SHAPE = 2, (1, 8, 512, 128)


@pytest.fixture(scope="module")
def cache():
    out = []
    for i in range(LAYERS):
        keys, values = mx.random.normal((2, *SHAPE), key=mx.random.key(i)).astype(mx.float16)
        layer = KVCache()
        layer.update_and_fetch(keys, values)
        mx.eval(layer.keys, layer.values)
        out.append(layer)
    return out


@pytest.fixture(scope="module")
def raw(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "raw.vkv"
    vkv.save(path, cache)
    return path


def held(cache) -> int:
    mx.eval([layer.state for layer in cache])
    return sum(layer.nbytes for layer in cache)


def test_digest(benchmark):
    data = bytes(1 << 22)
    assert len(benchmark(digest, data)) == 32


def test_inspect(benchmark, raw):
    assert benchmark(vkv.inspect, raw).accounting.adds_up


def test_save_raw(benchmark, cache, tmp_path):
    assert benchmark(lambda: vkv.save(tmp_path / "a.vkv", cache, durable=False)).size > 4e6


def test_save_raw_mlx_lm(benchmark, cache, tmp_path):
    benchmark(lambda: save_prompt_cache(str(tmp_path / "a.safetensors"), cache))
    assert (tmp_path / "a.safetensors").stat().st_size > 4e6


def test_load_raw(benchmark, cache, raw):
    assert benchmark(lambda: held(vkv.load(raw).cache)) == held(cache)


def test_load_raw_mlx_lm(benchmark, cache, tmp_path):
    path = str(tmp_path / "a.safetensors")
    save_prompt_cache(path, cache)
    assert benchmark(lambda: held(load_prompt_cache(path))) == held(cache)


@pytest.mark.parametrize("text", default_codecs())
@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_encode(benchmark, cache, text, tensor):
    codec = registry.parse(text).configure(tensor, "F16")
    x = getattr(cache[0], tensor)
    parts = benchmark(lambda: _evaluated(codec.encode(x)))
    assert parts.keys() == codec.layout(x.shape).keys()


@pytest.mark.parametrize("text", default_codecs())
def test_decode(benchmark, cache, text, tmp_path):
    path = tmp_path / "a.vkv"
    vkv.save(path, cache[:1], codec=text)
    file = open_file(path.read_bytes(), verify=False)
    tensor = file.header.layers[0].tensors["values"]

    def decode():
        out = [file.decode_segment(tensor, i, "values")[2] for i in range(len(tensor.segments))]
        mx.eval(out)
        return out

    assert sum(x.shape[-2] for x in benchmark(decode)) == SHAPE[2]
    file.close()


def _evaluated(parts):
    mx.eval(parts)
    return parts
