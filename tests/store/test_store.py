"""Put and get: what is found, how it is trimmed, and what is left to compute."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import vkv
from fixtures.models import tiny
from tests.helpers.stores import cache_of, held
from vkv.errors import CacheError, VkvError
from vkv.store.local import summary as describe


def test_nothing_is_created_by_looking(store, model):
    assert store.get([1, 2, 3], model=model) is None
    assert store.ls() == []
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("prompt", "covered"),
    [
        ([*range(10), 77, 78], 10),
        (list(range(10)), 9),
        (list(range(4)), 3),
        ([0, 1, 2, 50, 51], 3),
        ([50, 51], 0),
        ([0], 0),
        ([], 0),
    ],
    ids=["continued", "equal", "shorter", "diverging", "other", "one token", "none"],
)
def test_longest_prefix(store, model, prompt, covered):
    store.put(cache_of(range(10)), range(10), model=model)
    store.put(cache_of([0, 1]), [0, 1], model=model)
    hit = store.get(prompt, model=model)
    if covered == 0:
        assert hit is None
        return
    assert hit.tokens == covered
    assert hit.rest == prompt[covered:]
    assert [held(c) for c in hit.cache] == [prompt[:covered]] * 2


def test_found_by_another_store_object_and_by_the_models_id(store, model):
    entry = store.put(cache_of(range(5)), range(5), model=model)
    other = vkv.PromptStore(store.root)
    assert other.find([*range(5), 6], model=entry.model).tokens == 5
    assert other.get([*range(5), 6], model=bytes.fromhex(entry.model)).rest == [6]


def test_putting_the_same_again_is_the_same_entry(store, model):
    first = store.put(cache_of(range(5)), range(5), model=model)
    assert store.put(cache_of(range(5)), range(5), model=model).id == first.id
    assert [e.id for e in store.ls()] == [first.id]
    assert first.id == vkv.inspect(first.path).id == first.path.stem


def test_of_two_that_cover_as_much_the_lossless_one_answers(store, model):
    raw = store.put(cache_of(range(8)), range(8), model=model)
    lossy = store.put(cache_of(range(8)), range(8), model=model, codec="affine:bits=8,group=32")
    assert lossy.codec.startswith("affine")
    assert store.find(range(9), model=model).entry.id == raw.id
    store.put(cache_of(range(9)), range(9), model=model, codec="affine:bits=8,group=32")
    assert store.find(range(12), model=model).tokens == 9


def test_a_cache_that_cannot_be_trimmed_is_used_whole_or_not_at_all(store, model):
    wrapped = cache_of(range(10), RotatingKVCache, max_size=4)
    store.put(wrapped, range(10), model=model)
    assert store.get([*range(8), 70, 71], model=model) is None
    assert store.get(list(range(10)), model=model) is None
    hit = store.get([*range(10), 70], model=model)
    assert (hit.tokens, hit.rest) == (10, [70])


def test_the_next_best_entry_serves_where_the_longest_cannot_be_trimmed(store, model):
    store.put(cache_of(range(10), RotatingKVCache, max_size=4), range(10), model=model)
    store.put(cache_of(range(3), RotatingKVCache, max_size=4), range(3), model=model)
    assert store.get([*range(9), 70], model=model).tokens == 3


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "lfm2"])
def test_the_answer_is_that_of_a_prompt_never_stored(store, name):
    """Also for a window that has wrapped, latents, and a state that only goes on."""
    model = tiny.MODELS[name]()
    tokens = [(7 * i) % 251 for i in range(40)]
    whole, cache = make_prompt_cache(model), make_prompt_cache(model)
    expected = model(mx.array([tokens]), cache=whole)
    mx.eval(expected, model(mx.array([tokens[:30]]), cache=cache))
    store.put(cache, tokens[:30], model=model)
    hit = store.get(tokens, model=model)
    assert hit.tokens == 30
    logits = model(mx.array([hit.rest]), cache=hit.cache)
    assert mx.allclose(logits[:, -1], expected[:, -1], atol=1e-4)
    other = store.get([*tokens[:20], 252], model=model)
    assert (other.tokens if other else 0) == (0 if name in ("gemma3_text", "lfm2") else 20)


def chunked():
    cache = ChunkedKVCache(chunk_size=4)
    cache.step = 4  # mlx-lm 0.31 trims by its buffer, which must not be longer
    return cache


def past_the_front():
    cache = filled(chunked(), 8)
    cache.maybe_trim_front()
    return cache


def state():
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, 2))
    return cache


def filled(cache, tokens=8):
    rows = mx.ones((1, 2, tokens, 64))
    cache.update_and_fetch(rows, rows)
    return cache


@pytest.mark.parametrize(
    ("make", "trims"),
    [
        (lambda: filled(KVCache()), True),
        (lambda: filled(QuantizedKVCache()), True),
        (lambda: filled(ConcatenateKVCache()), True),
        (lambda: filled(RotatingKVCache(max_size=9)), True),
        (lambda: filled(RotatingKVCache(max_size=8)), False),
        (lambda: filled(RotatingKVCache(max_size=4)), False),
        (lambda: filled(chunked()), True),
        (past_the_front, False),
        (state, False),
        (lambda: CacheList(filled(KVCache()), filled(KVCache())), True),
        (lambda: CacheList(filled(KVCache()), state()), False),
    ],
)
def test_the_header_tells_whether_a_cache_can_be_trimmed(tmp_path, make, trims):
    info = vkv.save(tmp_path / "a.vkv", [make()], tokens=range(8))
    assert describe.trims(info.header.layers) == trims
    prompt = vkv.load(tmp_path / "a.vkv")
    if trims:
        assert prompt.resume([0, 99]) == [99]
    else:
        with pytest.raises(CacheError, match="L8"):
            prompt.resume([0, 99])


@pytest.mark.parametrize("model", [None, "x", "ab" * 31, b"ab", 5], ids=repr)
def test_what_is_no_model_is_said(store, tmp_path, model):
    for act in (
        lambda: store.put(cache_of([1]), [1], model=model),
        lambda: store.get([1, 2], model=model),
        lambda: store.find([1, 2], model=model),
    ):
        with pytest.raises(VkvError, match="model is "):
            act()
    if model is not None:
        with pytest.raises(VkvError, match="model is a"):
            vkv.save(tmp_path / "a.vkv", cache_of([1]), tokens=[1], model=model)
    assert not store.root.exists()


def test_forms_of_live_caches(store, model):
    with pytest.raises(VkvError, match="live='pakced', expected one of"):
        store.get([1, 2], model=model, live="pakced")


@pytest.mark.parametrize(
    ("name", "label"),
    [("org/Some-Model", "Some-Model"), ("/models/Other/", "Other"), ("", None), ("/", None)],
)
def test_labels_tell_models_apart(store, model, name, label):
    entry = store.put(cache_of([1]), [1], model=model, metadata={"model": name})
    assert entry.label == (label or f"llama {entry.model[:8]}")
