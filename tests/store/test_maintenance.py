"""What goes when there is no room, what stays, and the index against the files."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

import vkv
from tests.helpers.stores import cache_of, consistent, du, fill, flip, held, rewritten
from vkv.errors import StoreUnavailableError, VkvError
from vkv.format.document import open_document
from vkv.store.local import file_check, layout, removal


@pytest.fixture
def limited(store, model):
    """A store of five entries whose limit they just meet."""
    entries = fill(store, model)
    size = sum(e.size for e in entries)
    return vkv.PromptStore(store.root, max_bytes=size), entries


def test_the_one_used_longest_ago_goes_first(limited, model):
    store, entries = limited
    assert store.get([1] * 9, model=model).entry.uses == 0
    new = store.put(cache_of([9] * 8), [9] * 8, model=model)
    assert consistent(store) == [e.id for e in (new, entries[0], *entries[:1:-1])]
    assert store.ls()[1].uses == 1


def test_pinned_entries_stay(limited, model):
    store, entries = limited
    store.pin(entries[0].id, entries[1].id[:12])
    new = store.put(cache_of([9] * 8), [9] * 8, model=model)
    assert {e.id for e in store.ls()} == {e.id for e in (new, *entries)} - {entries[2].id}
    store.unpin(entries[0].id)
    store.put(cache_of([10] * 8), [10] * 8, model=model)
    assert entries[0].id not in consistent(store)


def test_what_does_not_fit_is_refused_and_nothing_goes(limited, model):
    store, entries = limited
    with pytest.raises(VkvError, match=r"an entry of [\d,]+ bytes, the limit is"):
        store.put(cache_of([9] * 800), [9] * 800, model=model)
    store.pin(*(e.id for e in entries))
    with pytest.raises(VkvError, match=r"no room: [\d,]+ bytes over the limit"):
        store.put(cache_of([9] * 8), [9] * 8, model=model)
    assert len(consistent(store)) == 5
    assert os.listdir(store.root / "incoming") == []


def test_two_models_share_the_limit(limited):
    store, entries = limited
    from fixtures.models import tiny

    store.put(cache_of([1] * 8), [1] * 8, model=tiny.llama(seed=1))
    assert entries[0].id not in consistent(store)
    assert store.stats().models == 2


def test_a_store_over_its_limit_is_opened_as_it_is(store, model):
    fill(store, model)
    over = vkv.PromptStore(store.root, max_bytes="1kB")
    assert len(over.ls()) == 5
    assert len(over.gc(dry_run=True).entries) == 5
    assert len(consistent(over)) == 5
    found = over.gc()
    assert (len(found.entries), found.freed) == (5, sum(e.size for e in found.entries))
    assert consistent(over) == []
    assert du(over) == 0


def test_what_nobody_used_for_long_goes(store, model):
    entries = fill(store, model, 3)
    with store._index.write() as db:
        db.execute("UPDATE entries SET used = used - 3600 WHERE n <= 2")
    store.pin(entries[0].id)
    assert store.gc(max_age="2h").entries == []
    assert [e.id for e in store.gc(max_age="30m").entries] == [entries[1].id]
    assert len(consistent(store)) == 2


def test_room_on_the_disk_is_kept(store, model, monkeypatch):
    entries = fill(store, model, 3)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("vkv.store.local.evict.shutil.disk_usage", lambda _: usage)
    careful = vkv.PromptStore(store.root, min_free=1000 + entries[0].size)
    new = careful.put(cache_of([9] * 8), [9] * 8, model=model)
    assert [e.id for e in careful.ls()] == [new.id, entries[2].id, entries[1].id]
    with pytest.raises(StoreUnavailableError, match="too few would stay free"):
        vkv.PromptStore(store.root, min_free="1GB").put(cache_of([8]), [8], model=model)
    assert len(consistent(store)) == 3


def test_rm_is_all_or_nothing(store, model):
    entries = fill(store, model, 3)
    with pytest.raises(VkvError, match="no entry with id 0000"):
        store.rm(entries[0].id, "0000")
    with pytest.raises(VkvError, match="'xyz' is not an id"):
        store.rm("xyz")
    assert len(store.ls()) == 3
    assert store.rm(entries[0].id, dry_run=True).freed == entries[0].size
    assert len(store.ls()) == 3
    assert [e.id for e in store.rm(entries[0].id, entries[2].id[:8]).entries] == [
        entries[0].id,
        entries[2].id,
    ]
    assert consistent(store) == [entries[1].id]


def test_modes(store, model):
    old = os.umask(0o022)
    try:
        fill(store, model, 1)
    finally:
        os.umask(old)
    for path in (store.root, *store.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# What does not belong


def test_a_file_that_the_index_does_not_know_is_entered(store, model):
    entries = fill(store, model, 2)
    with store._index.write() as db:  # as a crash between the two steps of put leaves it
        removal.take_out(db, [1])
        db.execute("DELETE FROM entries WHERE id = ?", (entries[0].id,))
    assert entries[0].path.exists()
    assert [f.message[:23] for f in store.verify().findings] == ["not in the index; gc li"]
    assert store.gc().entries == []
    assert len(store.ls()) == 2
    assert store.stats().bytes == du(store)


def test_litter_is_collected(store, model):
    fill(store, model, 1)
    desk = store.root / "incoming" / "1-dead"
    desk.mkdir()
    (desk / "new.vkv").write_bytes(b"x" * 100)
    stray = store.root / "objects" / "ab" / "stray.vkv"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"y" * 50)
    assert len(store.verify().findings) == 2
    assert store.gc(dry_run=True).freed == 150
    assert set(store.gc().files) == {desk, stray}
    assert not desk.exists()
    assert len(consistent(store)) == 1


def test_a_desk_in_use_is_left_alone(store):
    with store._layout.staging() as desk:
        assert store.gc().files == []
        layout.clear(desk)  # seen by gc before its writer locked it
        assert desk.exists()


def test_a_desk_that_is_being_cleared_is_not_used(store, monkeypatch):
    """The writer that made it waits for the lock, and makes another."""
    store._layout.make()
    seen = []
    made = Path.mkdir

    def mkdir(path, *args, **options):
        made(path, *args, **options)
        if path.parent == store.root / "incoming" and not seen:
            seen.append(path)
            layout.clear(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with store._layout.staging() as desk:
        assert desk != seen[0]
        assert desk.exists()


def of_tomorrow(segment):
    return replace(segment, codec="tomorrow")


def test_entries_of_an_unknown_codec_are_never_answered_and_collected(store, model, tmp_path):
    first = store.put(cache_of([1] * 8), [1] * 8, model=model)
    with open_document(first.path) as document:
        layers = tuple(
            replace(
                layer,
                tensors={
                    n: replace(t, segments=tuple(map(of_tomorrow, t.segments)))
                    for n, t in layer.tensors.items()
                },
            )
            for layer in document.header.layers
        )
    store.rm(first.id)
    with store._layout.staging() as desk:
        from vkv.store.local.ingest import ingest

        new = rewritten_from(first, desk / "new.vkv", layers, store, model)
        entry = ingest(store._index, store.limits, new)
    assert store.get([1] * 9, model=model) is None
    assert [e.id for e in store.ls()] == [entry.id]
    assert [e.id for e in store.gc().entries] == [entry.id]
    assert consistent(store) == []


def rewritten_from(entry, target, layers, store, model):
    again = store.put(cache_of([1] * 8), [1] * 8, model=model)
    assert again.id == entry.id
    rewritten(again.path, target, layers=layers)
    store.rm(again.id)
    return target


def test_files_of_another_version_are_put_aside(store, model):
    entry = store.put(cache_of([1] * 8), [1] * 8, model=model)
    target = store.root / "objects" / "ab" / f"{'ab' * 32}.vkv"
    target.parent.mkdir(exist_ok=True)
    rewritten(entry.path, target, version="2.0")
    assert (store.gc().files, store.gc().files) == ([], [])
    assert target.exists()
    assert [e.id for e in store.ls()] == [entry.id]
    (finding,) = store.verify().findings
    assert (finding.at, "put aside, refused by vkv" in finding.message) == (target.stem, True)
    assert store.stats().quarantined == target.stat().st_size
    assert [e.id for e in store.rm(target.stem).entries] == [target.stem]
    assert (target.exists(), consistent(store)) == (False, [entry.id])


# The index


def test_the_index_is_made_again_from_the_files(store, model):
    entries = fill(store, model)
    store.pin(entries[0].id)
    before = store.ls()
    assert store.reindex() == []
    assert store.ls() == before
    for path in store.root.glob("index*"):
        path.unlink()
    again = vkv.PromptStore(store.root)
    assert {e.id for e in again.ls()} == {e.id for e in entries}
    assert again.get([3] * 9, model=model).tokens == 8


def test_a_damaged_index_is_said_and_made_again(store, model):
    fill(store, model)
    (index,) = store.root.glob("index*.sqlite")
    for path in store.root.glob("index*"):
        path.unlink()
    index.write_bytes(b"not a database" * 1000)
    broken = vkv.PromptStore(store.root)
    with pytest.raises(VkvError, match="`vkv store reindex` builds a new index"):
        broken.ls()
    assert broken.reindex() == []
    assert len(consistent(broken)) == 5


def test_stats(store, model):
    assert store.stats().bytes == 0
    entries = fill(store, model)
    store.pin(entries[0].id)
    stats = store.stats()
    assert (stats.entries, stats.tokens, stats.models) == (5, 40, 1)
    assert (stats.bytes, stats.pinned) == (du(store), entries[0].size)


# In and out


def test_export_and_add(store, model, tmp_path):
    entry = store.put(cache_of(range(8)), range(8), model=model)
    assert store.export(entry.id[:10], tmp_path / "a.vkv").id == entry.id
    other = vkv.PromptStore(tmp_path / "other")
    assert other.add(tmp_path / "a.vkv").id == entry.id
    assert (tmp_path / "a.vkv").exists()
    assert other.get(range(9), model=model).tokens == 8


@pytest.mark.parametrize(
    ("given", "why"),
    [({"tokens": None}, "holds no token ids"), ({"model": None}, "names no model")],
)
def test_add_refuses_what_nobody_could_find(store, model, tmp_path, given, why):
    path = tmp_path / "a.vkv"
    vkv.save(path, cache_of(range(8)), **{"tokens": range(8), "model": model} | given)
    with pytest.raises(VkvError, match=why):
        store.add(path)
    assert store.ls() == []


def test_add_refuses_a_damaged_file(store, model, tmp_path):
    path = tmp_path / "a.vkv"
    vkv.save(path, cache_of(range(8)), tokens=range(8), model=model)
    flip(path)
    with pytest.raises(VkvError, match="the bytes changed"):
        store.add(path)
    assert os.listdir(store.root / "incoming") == []


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_token(path: Path) -> None:
    with open_document(path) as document:
        at = document.entries["vkv.tokens"].start
    flip(path, at)


@pytest.mark.parametrize("damage", [flip, flip_token, cut, empty, Path.unlink])
def test_a_damaged_entry_is_a_miss_and_the_next_best_serves(store, model, caplog, damage):
    store.put(cache_of(range(4)), range(4), model=model)
    entry = store.put(cache_of(range(8)), range(8), model=model)
    damage(entry.path)
    with caplog.at_level(logging.WARNING, "vkv.store"):
        hit = store.get([*range(8), 9], model=model)
    assert held(hit.cache[0]) == hit.rest[:0] + list(range(4))
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(f"{entry.id} is damaged and was taken out: ")
    assert len(consistent(store)) == 1


def test_a_damaged_neighbour_does_not_stop_a_put(store, model):
    entry = store.put(cache_of(range(8)), range(8), model=model)
    flip_token(entry.path)
    store.put(cache_of(range(9)), range(9), model=model)
    assert len(consistent(store)) == 1
    assert store.get(range(10), model=model).tokens == 9


def test_a_load_that_fails_for_want_of_memory_costs_no_entry(store, model, monkeypatch):
    """MLX's errors on reading look like damage; the bytes decide."""
    store.put(cache_of(range(8)), range(8), model=model)

    def fail(*_, **__):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "load", fail)
        assert store.get(range(9), model=model) is None
    assert store.get(range(9), model=model).tokens == 8


def test_a_neighbour_that_may_not_be_read_is_a_miss(store, model, monkeypatch):
    store.put(cache_of(range(8)), range(8), model=model)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(file_check, "read_tokens", refuse)
        assert store.get(range(9), model=model) is None
    assert store.get(range(9), model=model).tokens == 8


def test_order_of_use_survives_equal_clocks(store, model, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.0)
    entries = fill(store, model, 3)
    assert [e.id for e in store.ls()] == [e.id for e in reversed(entries)]
