"""Serve a tiny model to many clients at once, good and bad ones, and count what happens.

::

    python -m tests.serve.load --clients 50 --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fixtures.models import tiny
from tests.helpers import hostile_clients as clients
from tests.helpers.disks import small_disk
from tests.helpers.http_client import TEXT, send
from tests.helpers.serve_process import Process
from tests.helpers.stalls import Stalls

#: Each with its share of the clients, and the results that are right.
KINDS: dict[str, tuple[int, Callable[[str, random.Random], str], tuple[str, ...]]] = {
    "well-formed": (20, clients.ask_well, ("answered",)),
    "slow": (5, clients.ask_slowly, ("answered",)),
    "unfinished": (5, clients.ask_and_never_finish, ("left",)),
    "vanishing": (7, clients.ask_and_vanish, ("left",)),
    "broken": (5, clients.refused(clients.broken), ("refused",)),
    "malicious": (5, clients.refused(clients.malicious), ("refused",)),
    "another site": (3, clients.refused(clients.of_another_site), ("refused",)),
}
_SHARES = sum(share for share, _, _ in KINDS.values())


class Load:
    """Run clients against a server for some time.

    Args:
        server: The process.
        store: The folder of its store, to fill its disk; ``None`` to leave that out.
        count: Number of clients.
        seconds: How long they ask.

    Attributes:
        right: Number of results as expected, by kind of client.
        wrong: Other results, as (seconds since the start, kind, result).
        slowest: Seconds of the slowest well-formed request.
        memory: Samples of the server's resident memory, in MB.
        stalls: What the server did when a request had no answer for long.
    """

    def __init__(
        self, server: Process, store: Path | None, count: int, seconds: float, stalls: Stalls
    ):
        self.server, self._store, self._count, self.seconds = server, store, count, seconds
        self.right: Counter[str] = Counter()
        self.wrong: list[tuple[float, str, str]] = []
        self.slowest = 0.0
        self.memory: list[float] = []
        self.full, self.stalls = 0, stalls
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._done = threading.Event()

    def run(self) -> None:
        """Start all clients, and wait until they have ended."""
        kinds = [name for name, (share, _, _) in KINDS.items() for _ in range(share)]
        names = [kinds[i * _SHARES // self._count % _SHARES] for i in range(self._count)]
        loops = [(self._client, (name, i)) for i, name in enumerate(names)]
        others = [(self._mistype, ()), (self._sample, ()), (self._fill, ()), (self._watch, ())]
        threads = [threading.Thread(target=target, args=args) for target, args in loops + others]
        for thread in threads:
            thread.start()
        self._done.wait(self.seconds)
        self._done.set()
        for thread in threads:
            thread.join()

    def _client(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        _, ask, expected = KINDS[kind]
        while not self._done.is_set() and self.server.process.poll() is None:
            start = time.monotonic()
            with self.stalls.asking(kind):
                try:
                    result = ask(self.server.url, rng)
                except OSError as exc:
                    result = f"{type(exc).__name__}: {exc}"
            self._count_one(kind, result, expected, time.monotonic() - start)
            self._done.wait(rng.uniform(0, 0.2))

    def _count_one(self, kind: str, result: str, expected: tuple[str, ...], took: float) -> None:
        with self._lock:
            if kind == "well-formed":
                self.slowest = max(self.slowest, took)
            if result in expected:
                self.right[kind] += 1
            else:
                self.wrong.append((round(time.monotonic() - self._start, 1), kind, result))

    def _mistype(self) -> None:
        """Ask for a model that is not served, every second."""
        while not self._done.wait(1.0):
            start = time.monotonic()
            body = {"prompt": "a", "max_tokens": 1, "model": "org/mistyped"}
            with contextlib.suppress(OSError):
                status, _ = send(self.server.url, TEXT, body)
                took = time.monotonic() - start
                self._count_one("mistyped", str(status), ("404",), took)

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            self.stalls.look(self.server.process.pid, time.monotonic() - self._start)

    def _sample(self) -> None:
        while not self._done.wait(min(2.0, self.seconds / 20)):
            self.memory.append(resident(self.server.process.pid))

    def _fill(self) -> None:
        """Fill the disk of the store for a tenth of the time, after three tenths."""
        if self._store is None or self._done.wait(self.seconds * 0.3):
            return
        ballast = self._store.parent / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        self.full = len(list(self._store.rglob("*.vkv")))
        self._done.wait(self.seconds * 0.1)
        ballast.unlink()

    def growth(self) -> float:
        """Return the resident memory of the last quarter over that of the second one."""
        quarter = max(1, len(self.memory) // 4)
        early, late = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return (sum(late) / len(late)) / (sum(early) / len(early))


def resident(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
    ran = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return int(ran.stdout.strip() or 0) / 1024


def run(
    place: Path, count: int, seconds: float, stacks: Path | None = None
) -> tuple[Load, int, float]:
    """Return the counts, the exit status after SIGTERM, and the seconds until the end.

    A server that does not end within 60 s is killed; its stacks are in ``stacks`` then.
    """
    model = tiny.save_dir(tiny.llama(), tiny.tokenizer(), place / "model")
    with small_disk(place / "disk", 24) as disk:
        store = (disk or place) / "store"
        flags = ("--model", model, "--store", store, "--max-bytes", "12MB", "--min-tokens", 32)
        stalls = Stalls(stacks or place / "stacks.txt", place / "activity.json")
        with Process(
            place, *flags, "--log-level", "WARNING", script=stalls.script, env=stalls.env
        ) as server:
            load = Load(server, None if disk is None else store, count, seconds, stalls)
            load.run()
            waiting = threading.Thread(
                target=clients.ask_and_vanish, args=(server.url, random.Random(0))
            )
            waiting.start()
            time.sleep(0.2)
            start = time.monotonic()
            status = stalls.end(server.process)
            took = time.monotonic() - start
            waiting.join()
    return load, status, took


def main() -> None:
    """Run for the given time, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--stacks", type=Path, help="for the server's stacks, should it stall")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load, status, took = run(Path(folder), args.clients, args.seconds, args.stacks)
        log, activity = load.server.log(), load.stalls.activity()
    report = {
        "right": load.right, "wrong": load.wrong[:20], "wrong in all": len(load.wrong),
        "slowest well-formed, s": round(load.slowest, 1), "memory, MB": load.memory[::10],
        "memory, last quarter over second": round(load.growth(), 3),
        "entries when the disk was full": load.full, "exit status": status,
        "SIGTERM to end, s": round(took, 2), "tracebacks": log.count("Traceback"),
        "warnings": log.count("WARNING"), "stalls": load.stalls.seen,
        "where the server was, samples": activity,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    for text in log.split("Traceback")[1:]:
        print("Traceback" + text[:2000])


if __name__ == "__main__":
    main()
