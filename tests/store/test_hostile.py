"""A store that somebody tampered with: nothing outside it goes, no sound file goes."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest
from msgspec.structs import replace

import vkv
from fixtures.models import tiny
from tests.helpers.stores import cache_of, rewritten
from vkv.errors import HeaderError, VkvError
from vkv.format.document import open_document
from vkv.store.local import file_check

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


LIES = [
    "UPDATE entries SET digest = zeroblob(32)",
    "UPDATE entries SET tokens_at = 9",
    "UPDATE entries SET tokens_at = 'zz'",
    "UPDATE entries SET tokens = 9223372036854775807",
    "UPDATE entries SET tokens = 1 << 40",
    "UPDATE entries SET size = 9",
    "UPDATE entries SET size = -1",
    "UPDATE trees SET needs = 'zzz'",
]


@pytest.mark.parametrize("lie", LIES)
def test_no_sound_file_goes_on_the_word_of_the_index(two, model, lie):
    store, entries, _ = two
    again = tamper(store, lie)
    again.get([*A, 7], model=model)
    again.gc()
    assert all(e.path.exists() for e in entries)
    assert again.get([*A, 7], model=model).tokens == 40
    again.get([*B, 7], model=model)
    again.put(cache_of([*B, 7]), [*B, 7], model=model)
    assert [f.message for f in again.verify().findings] == []


BROKEN = [
    ["DELETE FROM nodes", "INSERT INTO nodes VALUES (-1, -1, x'00000000', 0)"],
    ["UPDATE nodes SET depth = 0, token = x'00000000', parent = id"],
    ["UPDATE nodes SET depth = 'zz'"],
    ["UPDATE nodes SET parent = 3 WHERE id = 1", "UPDATE nodes SET parent = 1 WHERE id = 3"],
    ["UPDATE entries SET removed = 2"],
    ["UPDATE entries SET removed = -1"],
    ["UPDATE entries SET tree = 'zz'"],
    ["UPDATE entries SET size = 'zz'"],
    ["UPDATE entries SET used = x'ff'"],
    ["UPDATE entries SET created = 'zz', removed = 'zz'"],
    ["UPDATE entries SET label = 1, node = 9223372036854775807"],
]


@pytest.mark.parametrize("statements", BROKEN)
@pytest.mark.parametrize("act", ["get", "find", "ls", "put", "gc", "stats"])
def test_a_broken_index_ends_in_an_answer_or_names_reindex(two, model, statements, act):
    store, _, _ = two
    again = tamper(store, *statements)
    acts = {
        "get": lambda: again.get([*A, 7], model=model),
        "find": lambda: again.find([*A, 7], model=model),
        "put": lambda: again.put(cache_of([*A, 7]), [*A, 7], model=model),
    }
    said = ""
    try:
        acts.get(act, getattr(again, act))()
    except VkvError as exc:
        said = str(exc)
    assert not said or "vkv store reindex" in said
    again.reindex()
    assert len(again.ls()) >= 2 or "removed = 2" in statements[0]
    assert not again.verify().findings


def test_another_models_cache_is_never_an_answer(two, model):
    from vkv import identity

    store, _, _ = two
    other = identity.model_id(tiny.llama(seed=5))
    again = tamper(store, ("UPDATE trees SET model = ?", (other,)))
    assert again.get([*A, 7], model=other) is None
    assert again.get([*A, 7], model=identity.model_id(model)).tokens == 40


def test_a_file_that_cannot_be_read_now_stays(two, monkeypatch):
    store, entries, _ = two
    store._index.close()
    (store.root / "index-1.sqlite").unlink()
    opened = file_check.open_document

    def failing(path):
        if path == entries[0].path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path)

    monkeypatch.setattr(file_check, "open_document", failing)
    again = vkv.PromptStore(store.root)
    assert again.gc().unread == [entries[0].path]
    monkeypatch.undo()
    assert (again.gc().files, len(again.ls())) == ([], 2)


def test_a_file_whose_base_lacks_its_tensors_is_refused(store, model, tmp_path):
    base = store.put(cache_of([9] * 800), [9] * 800, model=model)
    first, path = tmp_path / "first.vkv", tmp_path / "second.vkv"
    vkv.save(first, cache_of(A * 3), tokens=A * 3, model=model)
    long = [*A * 3, 5]
    vkv.save(path, cache_of(long), tokens=long, model=model, parent=first)
    with open_document(path) as document:
        old = document.header.tensors
    key = bytes.fromhex(base.id)
    tensors = {n: replace(t, file=key) if t.file else t for n, t in old.items()}
    evil = rewritten(path, tmp_path / "evil.vkv", tensors=tensors)
    with pytest.raises(HeaderError, match="holds no") as caught:
        store.add(evil)
    assert caught.value.rule == "H12"
