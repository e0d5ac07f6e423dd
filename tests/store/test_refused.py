"""Files that break a rule of the header: put aside, never deleted, tried again by another build."""

from __future__ import annotations

import pytest

import vkv
from tests.helpers.stores import cache_of, consistent, rewritten
from vkv.format.document import open_document
from vkv.store.local import file_check, removal


@pytest.fixture
def refused(store, model, tmp_path):
    """A file in its place that names a layer of no kind, and a sound entry beside it."""
    entry = store.put(cache_of(range(40)), range(40), model=model)
    with open_document(entry.path) as document:
        layers = document.header.layers[:1] * 3
    path = rewritten(entry.path, tmp_path / "new.vkv", layers=layers)
    target = store.root / "objects" / "cd" / f"{'cd' * 32}.vkv"
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    return target


@pytest.mark.parametrize("act", ["gc", "reindex"])
def test_it_is_put_aside_and_stays(store, refused, act):
    getattr(store, act)()
    getattr(store, act)()
    assert refused.exists()
    found = {f.message for f in store.verify().findings if f.at == refused.stem}
    assert any("put aside, refused by vkv" in text for text in found)
    assert len(store.ls()) == 1


def test_an_entry_that_a_newer_build_refuses_is_put_aside(store, model, monkeypatch):
    entry = store.put(cache_of(range(40)), range(40), model=model)

    def refuses(*_):
        raise vkv.errors.HeaderError("a new rule", rule="H99")

    with monkeypatch.context() as patch:
        patch.setattr(file_check, "open_document", refuses)
        from vkv.store.local import retrieve

        patch.setattr(retrieve, "open_document", refuses)
        assert store.get([*range(40), 7], model=model) is None
    assert (store.ls(), entry.path.exists()) == ([], True)
    (finding,) = store.verify().findings
    assert finding.message.startswith("put aside, refused by vkv")


def test_another_build_tries_it_again(store, model):
    entry = store.put(cache_of(range(40)), range(40), model=model)
    with store._index.write() as db:
        row = db.execute("SELECT * FROM entries").fetchone()
        removal.quarantine(db, row, "of a rule")
    store.close()
    assert store.get([*range(40), 7], model=model) is None  # the same build
    with store._index.write() as db:
        db.execute("UPDATE entries SET reason = 'vkv 0.0.1: of a rule'")
    store.close()
    assert store.get([*range(40), 7], model=model).tokens == 40
    assert consistent(store) == [entry.id]


def test_a_rebuilt_index_tries_it_again(store, model):
    entry = store.put(cache_of(range(40)), range(40), model=model)
    with store._index.write() as db:
        removal.quarantine(db, db.execute("SELECT * FROM entries").fetchone(), "of a rule")
        db.execute("UPDATE entries SET reason = 'vkv 0.0.1: of a rule'")
    store.reindex()
    assert consistent(store) == [entry.id]
