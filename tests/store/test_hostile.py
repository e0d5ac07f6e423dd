"""A store that somebody tampered with: nothing outside it goes, no sound file goes."""

from __future__ import annotations

import os
import shutil
import sqlite3

import pytest

import vkv
from tests.store.conftest import cache_of
from vkv.errors import VkvError

A, B = list(range(40)), [*range(20), *([99] * 20)]


@pytest.fixture
def two(store, model):
    """A store of two entries that share 20 tokens, and a folder beside it."""
    entries = [store.put(cache_of(t), t, model=model) for t in (A, B)]
    outside = store.root.parent / "outside"
    outside.mkdir()
    (outside / "precious.vkv").write_text("x")
    return store, entries, outside


def tamper(store, *statements):
    store._index.close()
    db = sqlite3.connect(store.root / "index-1.sqlite")
    for statement in statements:
        db.execute(*([statement] if isinstance(statement, str) else statement))
    db.commit()
    db.close()
    return vkv.PromptStore(store.root)


def link(folder, outside):
    """Let ``folder`` be a link to what was in it, now outside."""
    if folder.exists():
        shutil.move(folder, outside / "there")
    else:
        (outside / "there").mkdir()
    folder.symlink_to(outside / "there")


@pytest.mark.parametrize("name", ["incoming", "objects"])
def test_a_store_whose_folders_are_links_is_refused(two, model, name):
    store, _, outside = two
    link(store.root / name, outside)
    (outside / "there" / "a").mkdir()
    (outside / "there" / "a" / "b.vkv").write_text("x")
    before = sorted(outside.rglob("*"))
    again = vkv.PromptStore(store.root)
    with pytest.raises(VkvError, match="a link, expected a folder"):
        again.put(cache_of([7] * 9), [7] * 9, model=model)
    with pytest.raises(VkvError, match="a link, expected a folder"):
        again.gc()
    store.gc()
    assert sorted(outside.rglob("*")) == before


def test_nothing_is_removed_behind_a_linked_shard(two, model):
    store, entries, outside = two
    link(entries[0].path.parent, outside)
    before = sorted(outside.rglob("*"))
    store.rm(entries[0].id)
    store.gc()
    assert sorted(outside.rglob("*")) == before
    assert store.get([*A, 7], model=model).entry.id == entries[1].id
    with pytest.raises(VkvError, match="a link, expected a folder"):
        store.put(cache_of(A), A, model=model)


@pytest.mark.parametrize("state", [0, 2])
@pytest.mark.parametrize("act", ["get", "put", "gc"])
@pytest.mark.parametrize(
    "key", ["../../../outside/precious", "/precious", b"\xff", "ab\0c", "AB" * 32]
)
def test_an_id_in_the_index_is_no_path(two, model, key, state, act):
    store, entries, outside = two
    key = f"{outside}{key}" if key == "/precious" else key
    query = "UPDATE entries SET id = ?, removed = ? WHERE id = ?"
    again = tamper(store, (query, (key, state, entries[0].id)))
    if act == "get":
        assert again.get([*B, 7], model=model).tokens == 40
    elif act == "put":
        again.put(cache_of([*A, 7]), [*A, 7], model=model)
    again.gc()
    assert os.listdir(outside) == ["precious.vkv"]
    assert entries[0].path.exists()
    assert not again.verify().findings
    assert {e.id for e in entries} <= {e.id for e in again.ls()}
