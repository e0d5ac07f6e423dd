"""One suite for every store: a new one joins by a line in ``STORES``.

Each test says one thing that callers rely on. What only one store promises is tested in
``tests/store``.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import vkv
from fixtures.models import tiny
from tests.helpers.stores import cache_of, consistent, flip, held
from vkv.errors import VkvError

LONG = [n % 50 for n in range(200)]
OTHER = [*LONG[:80], *[60] * 40]


def plain(folder: Path) -> vkv.PromptStore:
    return vkv.PromptStore(folder / "store")


def tiered(folder: Path) -> vkv.PromptStore:
    """A local store whose entries are all at a remote too."""
    return vkv.TieredStore(folder / "store", remote=(folder / "r").as_uri(), write_through=True)


def fetching(folder: Path) -> vkv.PromptStore:
    """The same, limited: what it has not it fetches."""
    url = (folder / "r").as_uri()
    return vkv.TieredStore(folder / "store", remote=url, write_through=True, max_bytes="1GB")


STORES = [plain, tiered, fetching]


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


@pytest.fixture(params=STORES, ids=lambda kind: kind.__name__)
def store(request, tmp_path):
    with request.param(tmp_path) as found:
        yield found


def put(store, model, tokens, **options):
    return store.put(cache_of(tokens), tokens, model=model, **options)


def test_an_empty_store_has_nothing_and_makes_nothing(store, model):
    assert store.find(LONG, model=model) is None
    assert store.get(LONG, model=model) is None
    assert (store.ls(), len(store), list(store)) == ([], 0, [])
    assert store.stats().bytes == 0
    assert not store.root.exists()


def test_the_longest_prefix_is_returned_with_the_rest(store, model):
    entries = [put(store, model, tokens) for tokens in (LONG[:100], LONG, OTHER)]
    for prompt, number, covered in (
        ([*LONG, 60], 1, 200),
        (LONG, 1, 199),
        ([*OTHER, 1], 2, 120),
        ([*LONG[:90], 61, 62], None, 90),
    ):
        hit, found = store.get(prompt, model=model), store.find(prompt, model=model)
        assert (hit.tokens, found.tokens) == (covered, covered)
        assert [*held(hit.cache[0]), *hit.rest] == prompt
        assert number is None or hit.entry.id == entries[number].id
    assert store.get([7, 7, 7], model=model) is None
    assert store.get(LONG, model=bytes(32)) is None


def test_an_entry_is_a_file_of_its_id(store, model):
    entry = put(store, model, LONG, metadata={"model": "org/Name"}, name="n", tags=["b", "a"])
    assert vkv.inspect(entry.path).id == entry.id
    assert (entry.tokens, entry.size) == (200, entry.path.stat().st_size)
    assert (entry.label, entry.name, entry.tags) == ("Name", "n", ("a", "b"))
    assert store.entries(entry.id[:8]) == [entry] == store.ls() == list(store)
    assert store.entries("n") == [entry]
    with pytest.raises(VkvError, match="'m' is not an id: expected 4 to 64 hex digits, or"):
        store.entries("m")
    assert len(store) == 1


def test_putting_again_gives_the_same_entry(store, model):
    assert put(store, model, LONG).id == put(store, model, LONG).id
    assert len(consistent(store)) == 1


def test_what_is_removed_is_gone_from_this_store(store, model):
    first, second = put(store, model, LONG[:100]), put(store, model, [9] * 100)
    with pytest.raises(VkvError, match="no entry with id 0000"):
        store.rm(first.id, "0000")
    assert store.rm(first.id).freed == first.size
    assert consistent(store) == [second.id]


def test_pins_are_kept(store, model):
    entry, other = put(store, model, LONG[:100]), put(store, model, [9] * 100)
    assert store.pin(entry.id)[0].pinned
    assert [e.id for e in store.gc(max_bytes=0).entries] == [other.id]
    assert store.reindex() == []
    assert [e.pinned for e in store.ls()] == [True]
    store.unpin(entry.id)
    assert [e.id for e in store.gc(max_bytes=0).entries] == [entry.id]


def test_a_damaged_entry_never_raises_and_the_next_best_serves(store, model):
    short, long = put(store, model, LONG[:100]), put(store, model, [*LONG, 3])
    flip(long.path)
    found = store.verify().findings
    assert [f.rule for f in found] == ["D1"]
    assert store.get([*LONG, 7], model=model).entry.id in (short.id, long.id)
    assert not store.verify().findings


def test_an_entry_is_exported_and_added(store, model, tmp_path):
    put(store, model, LONG[:100])
    entry = put(store, model, LONG)
    store.export(entry.id, tmp_path / "a.vkv")
    assert not vkv.inspect(tmp_path / "a.vkv").dependencies
    other = vkv.PromptStore(tmp_path / "other")
    assert other.add(tmp_path / "a.vkv").tokens == 200
    flip(tmp_path / "a.vkv")
    with pytest.raises(VkvError) as caught:
        store.add(tmp_path / "a.vkv")
    assert caught.value.rule == "D1"


def test_it_is_pickled_and_survives_a_fork(store, model):
    entry = put(store, model, LONG)
    again = pickle.loads(pickle.dumps(store))
    assert (type(again), again.root) == (type(store), store.root)
    assert again.get([*LONG, 1], model=model).entry.id == entry.id
    if (pid := os.fork()) == 0:
        os._exit([e.id for e in store.ls()] != [entry.id])
    assert os.waitpid(pid, 0)[1] == 0


def test_it_is_closed_and_opens_again(store, model):
    put(store, model, LONG)
    store.close()
    assert len(store) == 1
