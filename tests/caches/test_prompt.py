"""Fitting a loaded cache to a new prompt: trimmed to what both share, or refused."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import vkv
from fixtures.models import tiny
from vkv.errors import CacheError, VkvError


def filled(cache, tokens: int):
    """A cache whose key and value of each token is the token's position."""
    rows = mx.broadcast_to(mx.arange(tokens, dtype=mx.float32)[:, None], (1, 1, tokens, 4))
    cache.update_and_fetch(rows, rows)
    return cache


def recurrent():
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, 2))
    return cache


def loaded(tmp_path, *caches, tokens=10):
    vkv.save(tmp_path / "a.vkv", list(caches), tokens=range(tokens))
    return vkv.load(tmp_path / "a.vkv")


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [
        (np.arange(12), [10, 11]),
        (mx.array([[*range(10), 3]]), [3]),
        (range(11), [10]),
        ((0, 1), [1]),
    ],
    ids=["numpy", "mlx", "range", "tuple"],
)
def test_resume_takes_ids_as_save_does(tmp_path, tokens, rest):
    assert loaded(tmp_path, filled(KVCache(), 10)).resume(tokens) == rest


@pytest.mark.parametrize("tokens", ["012", [1.0], [-1], [1 << 40], [[1], [2]], None, [None]])
def test_resume_refuses_what_is_no_token(tmp_path, tokens):
    prompt = loaded(tmp_path, filled(KVCache(), 10))
    with pytest.raises(VkvError) as caught:
        prompt.resume(tokens)
    assert caught.value.rule == "I2"
    assert prompt.cache[0].offset == len(prompt.tokens) == 10


@pytest.mark.parametrize(
    ("tokens", "rest", "kept"),
    [
        ([*range(10), 77, 78], [77, 78], 10),
        (list(range(10)), [9], 9),
        (list(range(4)), [3], 3),
        ([0, 1, 2, 50, 51], [50, 51], 3),
        ([0], [0], 0),
    ],
    ids=["continued", "equal", "shorter", "diverging", "first token"],
)
@pytest.mark.parametrize("cls", [KVCache, ConcatenateKVCache])
def test_resume(tmp_path, cls, tokens, rest, kept):
    prompt = loaded(tmp_path, filled(cls(), 10), filled(cls(), 10))
    assert prompt.resume(tokens) == rest
    assert prompt.tokens == tokens[:kept]
    for cache in prompt.cache:
        assert cache.offset == kept
        row = mx.full((1, 1, 1, 4), 99.0)
        keys, _ = cache.update_and_fetch(row, row)
        assert keys[0, 0, :, 0].tolist() == [*map(float, range(kept)), 99.0]


def test_an_empty_prompt_is_refused(tmp_path):
    with pytest.raises(CacheError, match="empty prompt"):
        loaded(tmp_path, filled(KVCache(), 10)).resume([])


def test_a_file_without_tokens_is_refused(tmp_path):
    vkv.save(tmp_path / "a.vkv", [filled(KVCache(), 3)])
    with pytest.raises(CacheError, match="holds no token ids"):
        vkv.load(tmp_path / "a.vkv").resume([1, 2])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (recurrent, "layers[1]: cannot drop the last 7 tokens: a ArraysCache holds only"),
        (
            lambda: filled(RotatingKVCache(max_size=4), 10),
            "layers[1]: cannot drop the last 7 tokens: a RotatingKVCache holds only",
        ),
        (
            lambda: CacheList(filled(KVCache(), 10), recurrent()),
            "layers[1]: cannot drop the last 7 tokens: a ArraysCache holds only",
        ),
    ],
    ids=["recurrent", "wrapped", "in a list"],
)
def test_all_layers_are_trimmed_or_none(tmp_path, other, why):
    prompt = loaded(tmp_path, filled(KVCache(), 10), other())
    with pytest.raises(CacheError) as exc:
        prompt.resume([0, 1, 2, 50])
    assert str(exc.value).startswith(why)
    assert prompt.cache[0].offset == 10
    assert prompt.tokens == list(range(10))


def test_a_recurrent_cache_is_used_when_the_prompt_goes_on_exactly(tmp_path):
    prompt = loaded(tmp_path, filled(KVCache(), 10), recurrent())
    assert prompt.resume([*range(10), 5]) == [5]


def test_a_chunk_is_not_trimmed_past_its_front(tmp_path):
    cache = ChunkedKVCache(chunk_size=4)
    cache.step = 4  # mlx-lm 0.31 trims by its buffer, which must not be longer
    cache = filled(cache, 8)
    cache.maybe_trim_front()
    cache = filled(cache, 2)
    prompt = loaded(tmp_path, cache, tokens=cache.offset)
    with pytest.raises(CacheError, match="a ChunkedKVCache can be cut to 4 tokens or more"):
        prompt.resume([90, 91], at_least=0)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_step_that_was_interrupted_in_a_hybrid_is_refused(name, layer, tmp_path):
    """State of the layers before has moved on, that behind has not; nothing counts it."""
    model = tiny.MODELS[name]()
    layers = model.model.layers
    layer = min(layer, len(layers) - 1)
    ids = list(range(1, 40))
    prompt = vkv.Prompt(make_prompt_cache(model), [])
    mx.eval(model(mx.array([prompt.resume(ids)]), cache=prompt.cache))
    prompt.extend([])
    rest = prompt.resume([*ids, 5, 6])

    class Broken:
        def __getattr__(self, name):
            return getattr(layers[layer], name)

        def __call__(self, *args, **kwargs):
            raise KeyboardInterrupt

    whole = list(layers)
    model.model.layers = [*whole[:layer], Broken(), *whole[layer + 1 :]]
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([rest]), cache=prompt.cache)
    model.model.layers = whole
    if layer == 0:  # no layer has seen the step
        assert prompt.resume([*ids, 5, 6]) == [5, 6]
        return
    for use in (
        lambda: prompt.resume([*ids, 5, 6, 7]),
        lambda: prompt.extend([]),
        lambda: vkv.save(tmp_path / "a.vkv", prompt, model=model),
    ):
        with pytest.raises(CacheError, match=r"a step was interrupted|would be recorded"):
            use()
    assert not (tmp_path / "a.vkv").exists()
