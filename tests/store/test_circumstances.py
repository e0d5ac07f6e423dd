"""An index that is busy or cannot be used now is left as it is, and delays no answer."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

import vkv
from tests.helpers.disks import small_disk
from tests.helpers.stores import cache_of, held
from vkv.errors import StoreUnavailableError, VkvError
from vkv.store.local import file_check, index, index_errors

A, B = list(range(40)), [*range(20), *([99] * 20)]


@pytest.fixture
def stocked(store, model):
    """A store of one pinned entry."""
    entry = store.put(cache_of(A), A, model=model)
    store.pin(entry.id)
    return store


@contextlib.contextmanager
def busy(store):
    """Another process that holds the write lock."""
    other = sqlite3.connect(store.root / "index-1.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        other.execute("ROLLBACK")
        other.close()


def pins(store):
    return [entry.pinned for entry in store.ls()]


def test_a_busy_index_is_refused_and_not_replaced(stocked, monkeypatch):
    monkeypatch.setattr(index, "PATIENCE", 0.1)
    with busy(stocked):
        for act in (stocked.reindex, stocked.gc, lambda: stocked.rm("0000"), stocked.unpin):
            with pytest.raises(StoreUnavailableError, match="another process") as caught:
                act()
            assert "reindex" not in str(caught.value)
    assert pins(stocked) == [True]
    assert stocked.reindex() == []
    assert pins(stocked) == [True]


def test_a_hit_waits_for_no_lock_and_its_use_is_noted_later(stocked, model):
    with busy(stocked):
        start = time.monotonic()
        for _ in range(3):
            assert stocked.get([*A, 7], model=model).tokens == 40
        assert time.monotonic() - start < 5
        assert stocked.ls()[0].uses == 0
    stocked.unpin(stocked.ls()[0].id)
    assert stocked.ls()[0].uses == 3


def test_a_damaged_entry_is_passed_over_while_another_process_writes(stocked, model):
    entry = stocked.put(cache_of([*A, 5]), [*A, 5], model=model)
    raw = bytearray(entry.path.read_bytes())
    raw[-1] ^= 1
    entry.path.write_bytes(raw)
    with busy(stocked):
        assert stocked.get([*A, 5, 7], model=model).tokens == 40
    assert entry.id in [e.id for e in stocked.ls()]
    assert stocked.get([*A, 5, 7], model=model).tokens == 40
    assert entry.id not in [e.id for e in stocked.ls()]


def test_a_reader_does_not_wait_for_a_thread_that_waits(stocked, model):
    with busy(stocked):
        thread = threading.Thread(target=stocked.pin, args=(stocked.ls()[0].id,), daemon=True)
        thread.start()
        start = time.monotonic()
        assert stocked.get([*A, 7], model=model).tokens == 40
        assert time.monotonic() - start < 5
        assert thread.is_alive()
    thread.join()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (sqlite3.SQLITE_IOERR_READ, "cannot be read or written at the moment"),
        (sqlite3.SQLITE_CANTOPEN, "cannot be read or written at the moment"),
        (sqlite3.SQLITE_FULL, "no space is left"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "another process"),
    ],
)
def test_circumstances_are_told_apart_from_damage(stocked, monkeypatch, code, words):
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code

    def refuse(*_):
        raise error

    monkeypatch.setattr(index, "PATIENCE", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(index, "begin_state", refuse)
        for act in (stocked.ls, stocked.reindex):
            with pytest.raises(StoreUnavailableError, match=words):
                act()
    assert pins(stocked) == [True]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, 1])
def test_damage_is_called_damage(stocked, code):
    error = sqlite3.DatabaseError("as SQLite says it")
    error.sqlite_errorcode = code
    with (
        pytest.raises(index_errors.DamagedIndexError, match="vkv store reindex"),
        index_errors.index_errors(stocked._layout),
    ):
        raise error


def test_a_writer_that_waited_while_the_index_was_replaced_writes_to_the_new_one(
    stocked, model, monkeypatch
):
    """What is put during a ``reindex`` is listed after it."""
    other = vkv.PromptStore(stocked.root)
    other.ls()
    replaced = threading.Event()
    put = []

    def slow(*args):
        thread.start()
        time.sleep(0.5)
        replaced.set()
        return flush(*args)

    from vkv.store.local import rebuild

    flush = rebuild._flush
    monkeypatch.setattr(rebuild, "_flush", slow)
    write = lambda: put.append(other.put(cache_of(B), B, model=model))  # noqa: E731
    thread = threading.Thread(target=write)
    assert stocked.reindex() == []
    thread.join()
    assert replaced.is_set()
    assert put[0].id in [e.id for e in stocked.ls()]
    assert sorted(pins(other)) == [False, True]
    assert not stocked.verify().findings


def test_pins_of_files_that_cannot_be_read_now_are_kept(stocked, model, monkeypatch):
    (entry,) = stocked.ls()
    opened = file_check.open_document

    def refuse(path):
        if path == entry.path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(file_check, "open_document", refuse)
        assert stocked.reindex() == [entry.path]
    assert pins(stocked) == [True]
    assert stocked.get([*A, 7], model=model) is None
    stocked.gc()
    assert stocked.get([*A, 7], model=model).tokens == 40
    assert pins(stocked) == [True]
    assert not stocked.verify().findings


def test_gc_and_reindex_read_files_without_the_lock(stocked, model, tmp_path, monkeypatch):
    """Whoever reads a file for them can write to the index meanwhile."""
    shutil.copytree(stocked.root / "objects", tmp_path / "more" / "objects")
    store = vkv.PromptStore(tmp_path / "more")
    store.put(cache_of(B), B, model=model)
    with store._index.write() as db:
        db.execute("UPDATE entries SET size = 1")
    opened, seen = file_check.open_document, []

    def reading(path):
        other = sqlite3.connect(store.root / "index-1.sqlite", isolation_level=None, timeout=0)
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        other.close()
        seen.append(path)
        return opened(path)

    monkeypatch.setattr(file_check, "open_document", reading)
    store.gc()
    assert len(seen) == 2
    assert store.reindex() == []
    assert len(seen) == 4
    assert len(store.ls()) == 2


def test_a_file_that_was_replaced_before_the_lock_is_not_taken_out(stocked, model, monkeypatch):
    """Another reader takes the damaged entry out, and stores it anew, just before."""
    from vkv.store.local import retrieve

    (entry,) = stocked.ls()
    raw = bytearray(entry.path.read_bytes())
    raw[-1] ^= 1
    entry.path.write_bytes(raw)
    discard, other = retrieve.discard, vkv.PromptStore(stocked.root)

    def late(*args, **options):
        monkeypatch.setattr(retrieve, "discard", discard)
        assert other.get([*A, 7], model=model) is None
        assert other.put(cache_of(A), A, model=model).id == entry.id
        return discard(*args, **options)

    monkeypatch.setattr(retrieve, "discard", late)
    stocked.get([*A, 7], model=model)
    assert entry.path.exists()
    assert stocked.get([*A, 7], model=model).tokens == 40


def test_putting_again_mends_a_file_that_has_rotted(stocked, model):
    (entry,) = stocked.ls()
    raw = bytearray(entry.path.read_bytes())
    raw[-1] ^= 1
    entry.path.write_bytes(raw)
    assert stocked.put(cache_of(A), A, model=model).id == entry.id
    assert vkv.validate(entry.path).ok
    assert not stocked.verify(deep=True).findings


def test_a_path_too_long_for_sqlite_is_said(tmp_path, capsys):
    root = tmp_path.joinpath(*["d" * 99] * 6)
    (root / "objects").mkdir(parents=True)
    with pytest.raises(StoreUnavailableError, match=r"a path of \d+ bytes, SQLite opens up to 511"):
        vkv.PromptStore(root).ls()
    assert capsys.readouterr().err == ""


# Taken over unasked


def test_a_relative_root_does_not_move(tmp_path, model, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    store = vkv.PromptStore("store")
    entry = store.put(cache_of(A), A, model=model)
    monkeypatch.chdir(tmp_path / "b")
    assert store.get([*A, 7], model=model).tokens == 40
    assert [e.path for e in store.ls()] == [entry.path]
    store.put(cache_of(B), B, model=model)
    assert os.listdir(tmp_path / "b") == []


def test_a_store_is_not_made_where_its_disk_is_missing(tmp_path, model):
    path = tmp_path / "not" / "mounted"
    for act in (
        lambda s: s.put(cache_of(A), A, model=model),
        lambda s: s.add("a.vkv"),
    ):
        with pytest.raises(VkvError, match="expected one to make the store in"):
            act(vkv.PromptStore(path))
    assert vkv.PromptStore(path).ls() == []
    assert list(tmp_path.iterdir()) == []
    assert vkv.PromptStore(path, parents=True).put(cache_of(A), A, model=model).tokens == 40


def test_a_store_is_pickled(stocked, model):
    again = pickle.loads(pickle.dumps(vkv.PromptStore(stocked.root, max_bytes="1MB")))
    assert (again.root, again.limits.max_bytes) == (stocked.root, 10**6)
    assert again.get([*A, 7], model=model).tokens == 40


FORKS = """if True:
    import os, signal, sys, threading
    import vkv
    store = vkv.PromptStore(sys.argv[1])
    done = threading.Event()
    def read():
        while not done.is_set():
            store.ls()
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        if (pid := os.fork()) == 0:
            signal.alarm(20)
            os._exit(len(store.ls()) != 1)
        if status := os.waitpid(pid, 0)[1]:
            done.set()
            sys.exit(f"a child ended with {status}")
    done.set()
"""


def test_a_child_does_not_inherit_a_lock_that_a_thread_holds(stocked):
    command = [sys.executable, "-c", FORKS, str(stocked.root)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_times_of_a_clock_that_was_ahead(store, model, monkeypatch):
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 3650 * 86400)
        early = store.put(cache_of(A), A, model=model)
    small = vkv.PromptStore(store.root, max_bytes=int(early.size * 2.5))
    for n in range(3):
        small.put(cache_of([n] * 40), [n] * 40, model=model)
    assert early.id not in [e.id for e in small.ls()]


def test_a_full_disk_says_the_room_asked_for_and_loses_nothing(model, tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        if disk is None:
            pytest.skip("only root may mount a disk")
        store = vkv.PromptStore(disk / "store")
        entry = store.put(cache_of(A), A, model=model)
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        long = list(range(1000, 1400))
        with pytest.raises(
            StoreUnavailableError, match=r"about \d[\d,]+ bytes .*make room"
        ) as caught:
            store.put(cache_of(long), long, model=model)
        assert caught.value.no_space
        assert store.get([*A, 7], model=model).tokens == 40
        (disk / "ballast").unlink()
        assert store.put(cache_of(long), long, model=model).tokens == 400
        assert {e.id for e in store.ls()} >= {entry.id}
        assert not store.verify().findings
        store.close()


# Quarantine


def test_an_entry_that_load_refuses_is_put_aside_and_the_next_best_serves(
    store, model, monkeypatch, caplog
):
    """As a file that breaks a rule which only a later release checks."""
    from vkv.caches.loading import load as loading
    from vkv.errors import CacheError

    short = store.put(cache_of(A[:30]), A[:30], model=model)
    entry = store.put(cache_of(A), A, model=model)
    real = loading.load_file

    def refuses(file, **options):
        if file.document.id == entry.id:
            raise CacheError("a rule is broken", rule="L5", at="layers[0]")
        return real(file, **options)

    monkeypatch.setattr(loading, "load_file", refuses)
    with caplog.at_level(logging.WARNING, "vkv.store"):
        hit = store.get([*A, 7], model=model)
    assert (hit.entry.id, held(hit.cache[0])) == (short.id, A[:30])
    assert "was put aside" in caplog.text
    assert [e.id for e in store.ls()] == [short.id]
    (finding,) = store.verify().findings
    assert (finding.at, "a rule is broken" in finding.message) == (entry.id, True)
    assert entry.path.exists()
    assert store.stats().quarantined == entry.size
    store.gc()
    store.reindex()
    assert store.get([*A, 7], model=model).tokens == 30
    assert [f.at for f in store.verify().findings] == [entry.id]
    monkeypatch.setattr(loading, "load_file", real)
    store.put(cache_of(A), A, model=model)
    assert store.get([*A, 7], model=model).tokens == 40
    store.rm(entry.id)
    assert not store.verify().findings


def test_an_entry_of_no_use_to_this_model_is_passed_over_and_stays(store, model, monkeypatch):
    from vkv.caches.loading import load as loading
    from vkv.errors import MismatchError

    short = store.put(cache_of(A[:30]), A[:30], model=model)
    entry = store.put(cache_of(A), A, model=model)
    real = loading.load_file

    def refuses(file, **options):
        if file.document.id == entry.id:
            raise MismatchError(["another adapter"])
        return real(file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_file", refuses)
        assert store.get([*A, 7], model=model).entry.id == short.id
    assert len(store.ls()) == 2
    assert store.get([*A, 7], model=model).tokens == 40
