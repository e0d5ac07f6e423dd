"""Put and get: what is found, how it is trimmed, and what is left to compute."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import RotatingKVCache

import vkv
from tests.store.conftest import cache_of, held


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
