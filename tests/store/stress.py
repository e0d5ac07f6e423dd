"""Many processes on one store, killed at random; by hand: ``python -m tests.store.stress 60``.

Workers put, get, remove, collect and pin at random in a store too small for all. Each
checks that what it gets is what its tokens say. Now and then one is killed, and
another takes its place. At the end one ``gc`` must leave a store in which ``verify``
finds nothing and whose statistics equal its files.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import vkv
from fixtures.models import tiny
from tests.helpers.stores import cache_of, held
from vkv.errors import VkvError

WORKERS = 8
LIMIT = 600_000
#: Conversations, each a sequence of tokens of its own behind a common beginning.
CHATS = [[*range(40), *(1000 * n + i for i in range(200))] for n in range(1, 5)]


def work(root: Path, seed: int, tally: int) -> None:
    """Until killed, or told to stop; exits with 0, or with a traceback."""
    stop = False

    def end(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, end)
    chance = random.Random(seed)
    model = tiny.llama()
    store = vkv.PromptStore(root, max_bytes=LIMIT)
    while not stop:
        os.write(tally, step(store, model, chance).encode() + b"\n")


def step(store: vkv.PromptStore, model: Any, chance: random.Random) -> str:
    """One thing done to the store; its name."""
    tokens = chance.choice(CHATS)[: chance.randrange(20, 240, 20)]
    name = chance.choices(["put", "get", "rm", "gc", "pin"], [6, 10, 1, 1, 1])[0]
    if name == "put":
        try:
            store.put(cache_of(tokens), tokens, model=model)
        except VkvError as exc:
            if "no room" not in str(exc):  # pins, and what they stand on
                raise
            return "full"
    elif name == "get":
        hit = store.get([*tokens, 7], model=model)
        if hit is None:
            return "miss"
        assert [*held(hit.cache[0]), *hit.rest] == [*tokens, 7]
        assert held(hit.cache[1]) == tokens[: hit.tokens]
    elif name == "gc":
        store.gc()
    elif entries := store.ls():
        key = chance.choice(entries).id
        with contextlib.suppress(VkvError):  # another process was faster
            store.rm(key) if name == "rm" else store.pin(key)
            store.unpin(*(e.id for e in entries if e.pinned))  # at most a few at a time
    return name


def spawn(root: Path, seed: int, tally: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(root, seed, tally)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def run(root: Path, seconds: float) -> Counter[str]:
    """Let the workers loose, then check what they left.

    Returns:
        How often each thing was done, and how many were killed.
    """
    read_end, tally = os.pipe()
    os.set_blocking(read_end, False)
    pids = [spawn(root, n, tally) for n in range(WORKERS)]
    try:
        killed, said = _kill_some(root, pids, tally, read_end, seconds)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * WORKERS, "a worker failed"
        pids.clear()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return Counter((said + _read(read_end)).decode().split()) + Counter(killed=killed)


def _kill_some(
    root: Path, pids: list[int], tally: int, read_end: int, seconds: float
) -> tuple[int, bytes]:
    """Kill and replace workers for a while; how many, and what they said."""
    chance, killed, said = random.Random(0), 0, b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.05, 0.7))
        said += _read(read_end)
        victim = chance.randrange(WORKERS)
        os.kill(pids[victim], signal.SIGKILL)
        _, status = os.waitpid(pids[victim], 0)
        killed += 1
        pids[victim] = spawn(root, WORKERS + killed, tally)
        assert os.WIFSIGNALED(status), "a worker failed by itself"
    time.sleep(1)  # the youngest set up their handlers
    return killed, said


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def check(root: Path) -> None:
    """One ``gc``, and everything is in order."""
    store = vkv.PromptStore(root, max_bytes=LIMIT)
    left = list(root.rglob("*.vkv-tmp"))
    found = store.gc()
    print(f"gc: {len(found.entries)} entries, {len(found.files)} files, {len(left)} temporary")
    assert [str(f) for f in store.verify(deep=True).findings] == []
    files = [p for p in (root / "objects").rglob("*") if p.is_file()]
    assert store.stats().bytes == sum(p.stat().st_size for p in files)
    assert os.listdir(root / "incoming") == []
    before = {e.id: e.pinned for e in store.ls()}
    store.reindex()
    assert {e.id: e.pinned for e in store.ls()} == before


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        print(dict(run(root, seconds)))
        check(root)


if __name__ == "__main__":
    main()
