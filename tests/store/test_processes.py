"""Many processes on one store; a store that can only be read; a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import vkv
from tests.helpers.stores import cache_of, consistent

ROOT = Path(__file__).parents[2]


def python(*args: object, **options):
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, **options)


@pytest.mark.hostile
def test_eight_processes_some_of_them_killed():
    done = python("-m", "tests.store.stress", 5)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    print(done.stdout)


ONE_ENTRY = """if True:
    import os, sys
    import vkv
    from fixtures.models import tiny
    from tests.helpers.stores import cache_of
    parts = []
    for _ in range(8):
        if (pid := os.fork()) == 0:
            store = vkv.PromptStore(sys.argv[1])
            entry = store.put(cache_of(range(50)), range(50), model=tiny.llama())
            os._exit([e.id for e in store.ls()] != [entry.id])
        parts.append(pid)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in parts))
"""


@pytest.mark.hostile
def test_eight_processes_put_the_same_into_a_new_store(store):
    done = python("-c", ONE_ENTRY, store.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(consistent(store)) == 1
    assert store.gc().files == []


#: Runs each of its arguments, ``module name act root``, in a process that dies on calling a name.
KILLED = """if True:
    import importlib, os, signal, sys
    import vkv
    from fixtures.models import tiny
    from tests.helpers.stores import cache_of
    for case in sys.argv[1:]:
        module, name, act, root = case.split()
        if (pid := os.fork()) == 0:
            module = importlib.import_module(f"vkv.store.{module}")
            *path, name = name.split(".")
            for part in path:
                module = getattr(module, part)
            setattr(module, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            store = vkv.PromptStore(root)
            if act == "put":
                store.put(cache_of(range(9)), range(9), model=tiny.llama())
            else:
                store.rm(store.ls()[0].id)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            sys.exit(case)
"""
STEPS = [
    ("local.ingest ingest put", 1, 1),
    ("local.ingest sync_directory put", 2, 2),
    ("local.entries by_number put", 1, 2),
    ("local.layout Layout.accept put", 1, 1),
    ("local.removal sweep rm", 0, 0),
    ("local.removal take_out rm", 1, 1),
]


@pytest.mark.hostile
def test_a_kill_at_every_step(tmp_path, model):
    """What was listed before is whole; the rest is gone, or in, after one gc."""
    stores = [vkv.PromptStore(tmp_path / str(i)) for i in range(len(STEPS))]
    for store in stores:
        store.put(cache_of(range(5)), range(5), model=model)
    cases = [f"{step} {store.root}" for (step, _, _), store in zip(STEPS, stores, strict=True)]
    done = python("-c", KILLED, *cases)
    assert (done.returncode, done.stderr) == (0, "")
    for (step, listed, after), store in zip(STEPS, stores, strict=True):
        assert len(store.ls()) == listed, step
        for entry in store.ls():
            assert vkv.validate(entry.path).ok
        store.gc()
        assert len(consistent(store)) == after, step
        assert os.listdir(store.root / "incoming") == []


READ = """if True:
    import sys
    import vkv
    from fixtures.models import tiny
    from tests.helpers.stores import cache_of
    store = vkv.PromptStore(sys.argv[1])
    hit = store.get(range(9), model=tiny.llama())
    print(hit.tokens, len(store.ls()), store.stats().entries, len(store.verify().findings))
    damaged = store.ls()[-1].path
    try:
        store.put(cache_of(range(6)), range(6), model=tiny.llama())
    except OSError as exc:
        print(type(exc).__name__, exc.filename.startswith(sys.argv[1]))
    store.rm(store.ls()[0].id)
"""


@pytest.fixture
def read_only(tmp_path, model):
    """A store whose modes let nobody write."""
    store = vkv.PromptStore(tmp_path / "store")
    store.put(cache_of(range(8)), range(8), model=model)
    store._index.close()
    paths = [store.root, *store.root.rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    yield store.root
    for path in paths:
        if path.is_dir():
            path.chmod(0o700)


#: To root no file is read-only, unless it gives that up.
HUMBLE = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []


@pytest.mark.skipif(bool(HUMBLE) and not shutil.which("setpriv"), reason="root, without setpriv")
def test_a_store_that_can_only_be_read(read_only):
    command = [*HUMBLE, sys.executable, "-c", READ, str(read_only)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["8 1 1 0", "PermissionError True"], done.stderr
    assert "Permission denied" in done.stderr.splitlines()[-1]


def test_threads_share_a_store_object(store, model):
    errors = []

    def act(n):
        try:
            for _ in range(5):
                store.put(cache_of([n] * 4), [n] * 4, model=model)
                assert store.get([n] * 5, model=model).tokens == 4
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=act, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(consistent(store)) == 4


def test_a_fork_opens_an_index_of_its_own(store, model):
    code = """if True:
        import os, sys
        import vkv
        store = vkv.PromptStore(sys.argv[1])
        (entry,) = store.ls()
        if (pid := os.fork()) == 0:
            store.pin(entry.id)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.ls()[0].pinned
    """
    store.put(cache_of(range(4)), range(4), model=model)
    done = python("-c", code, store.root)
    assert (done.returncode, done.stderr) == (0, "")
