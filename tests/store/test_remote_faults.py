"""A remote that is silent, hostile or shared by a fork hurts no answer of the local store."""

from __future__ import annotations

import logging
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import time

import pytest

import vkv
from tests.helpers.stores import cache_of, rewritten
from vkv.errors import CacheError
from vkv.store.remote import patience
from vkv.store.remote.objects import object_name
from vkv.store.remote.patience import Patience
from vkv.store.remote.remote import Remote

LONG = [n % 50 for n in range(200)]


@pytest.fixture
def url(tmp_path):
    return (tmp_path / "there").as_uri()


def test_a_silent_remote_delays_an_answer_by_its_deadline_and_then_not_at_all(
    tmp_path, url, model, monkeypatch, caplog
):
    store = vkv.TieredStore(tmp_path / "here", remote=url, deadline=0.5)
    store.put(cache_of(LONG), LONG, model=model)
    silent = threading.Event()
    monkeypatch.setattr(Remote, "find", lambda *_, **__: silent.wait(60) and None)
    with caplog.at_level(logging.WARNING, "vkv.store"):
        times = []
        for _ in range(3):
            start = time.monotonic()
            assert store.get([*LONG, 60], model=model).tokens == 200
            times.append(time.monotonic() - start)
    silent.set()
    assert times[0] >= 0.5
    assert "no answer within 0.5 s; not asked for 30 s" in caplog.text
    assert len(caplog.records) == 1


def test_pauses_grow_and_end_with_an_answer(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock[0])

    def fails():
        asked.append(clock[0])
        raise ConnectionRefusedError(111, "cannot be reached")

    wary = Patience(5.0)
    for second in range(2000):
        clock[0] = float(second)
        wary.attempt(fails)
    assert asked == [0, 30, 90, 210, 450, 930, 1530]
    clock[0] = 3000.0
    wary.attempt(lambda: None)
    wary.attempt(fails)
    clock[0] = 3030.0
    wary.attempt(fails)
    assert asked[-2:] == [3000, 3030]


def test_an_entry_there_that_breaks_a_rule_is_passed_over(tmp_path, url, model):
    """Its names lead to it, as a writer of the remote can make them."""
    path = tmp_path / "a.vkv"
    vkv.save(path, cache_of(LONG), tokens=LONG, model=model)
    key, head = vkv.inspect(path).id, vkv.inspect(path).header
    scalars = {"offset": 199}
    layers = tuple(type(x)(kind=x.kind, scalars=scalars, tensors=x.tensors) for x in head.layers)
    evil = rewritten(path, tmp_path / "evil.vkv", layers=layers)
    there = Remote(url)
    there.push(path)
    with pytest.raises(CacheError):
        there.push(evil)
    evil_id = vkv.inspect(evil).id
    (tmp_path / "there" / object_name(evil_id)).parent.mkdir(exist_ok=True)
    shutil.copy(evil, tmp_path / "there" / object_name(evil_id))
    for name in (tmp_path / "there" / "keys").rglob(f"*-{key}"):
        name.rename(name.with_name(name.name.replace(key, evil_id)))
    store = vkv.TieredStore(tmp_path / "here", remote=url)
    store.put(cache_of(LONG[:100]), LONG[:100], model=model)
    assert store.get([*LONG, 60], model=model).tokens == 100
    with pytest.raises(CacheError) as caught:
        store.pull(evil_id)
    assert caught.value.rule == "L5"
    assert len(store.ls()) == 1
    assert not store.verify().findings


def test_only_the_owner_reads_what_is_pushed_to_a_disk(tmp_path, url, model):
    path = tmp_path / "a.vkv"
    vkv.save(path, cache_of(LONG), tokens=LONG, model=model)
    Remote(url).push(path)
    made = [tmp_path / "there", *(tmp_path / "there").rglob("*")]
    assert {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in made} == {
        (True, 0o700),
        (False, 0o600),
    }


def test_a_remote_is_pickled(tmp_path, url, model):
    path = tmp_path / "a.vkv"
    vkv.save(path, cache_of(LONG), tokens=LONG, model=model)
    there = Remote(url)
    key = there.push(path)
    assert [k for k, _ in pickle.loads(pickle.dumps(there)).ls()] == [key]


S3_AFTER_FORK = """if True:
    import os, signal, sys
    import fsspec
    from vkv.store import Remote
    there = Remote("s3://forked/place")
    there.objects.files.mkdir("forked")
    there.objects.files.pipe_file("forked/place/objects/ab/" + "ab" * 32 + ".vkv", b"x")
    for act in (there.ls, lambda: Remote("s3://forked/place").ls()):
        if (pid := os.fork()) == 0:
            signal.alarm(60)
            os._exit(len(act()) != 1)
        if status := os.waitpid(pid, 0)[1]:
            sys.exit(f"a child ended with {status}")
"""


@pytest.mark.slow
def test_a_remote_works_in_a_child_of_the_process_that_made_it():
    from tests.helpers import servers

    with servers.s3():
        command = [sys.executable, "-c", S3_AFTER_FORK]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
