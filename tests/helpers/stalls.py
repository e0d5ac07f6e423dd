"""Find out what a server does while a request waits for long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds without an answer that are a stall.
LONG = 20.0
#: Stalls that are noted at most.
MOST = 5


@dataclass
class Stalls:
    """Watch requests, and have the server write its stacks if one waits for ``LONG``.

    Args:
        stacks_path: Where the server writes them.
        activity_path: Where it counts what its threads do.

    Attributes:
        seen: One dict for each stall: when, the kinds that wait, and what the system knows
            of the server.
    """

    stacks_path: Path
    activity_path: Path
    seen: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[int, tuple[float, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _noted: float = 0.0

    script = Path(__file__).parent / "traced_serve.py"

    @property
    def env(self) -> dict[str, str]:
        """Variables for the script."""
        return {"STACKS": str(self.stacks_path), "ACTIVITY": str(self.activity_path)}

    @contextlib.contextmanager
    def asking(self, kind: str) -> Iterator[None]:
        """Count the time of one request of this thread."""
        me = threading.get_ident()
        with self._lock:
            self._open[me] = (time.monotonic(), kind)
        try:
            yield
        finally:
            with self._lock:
                del self._open[me]

    def look(self, pid: int, at: float) -> None:
        """Note a stall, at ``at`` seconds since the start, and have the stacks written once."""
        now = time.monotonic()
        with self._lock:
            waiting = Counter(kind for start, kind in self._open.values() if now - start > LONG)
        if not waiting or len(self.seen) == MOST or now - self._noted < LONG:
            return
        self._noted = now
        self.seen.append({"at, s": round(at, 1), "waiting": dict(waiting)} | about(pid))
        os.kill(pid, signal.SIGUSR1)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM and return the exit status; kill a process that does not end in 60 s."""
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            self.seen.append({"waiting": "for the end"} | about(process.pid))
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # the stacks are written
            process.kill()
            return process.wait()

    def activity(self) -> dict[str, int]:
        """Return the number of samples by thread and function."""
        if not self.activity_path.exists():
            return {}
        counts: dict[str, int] = json.loads(self.activity_path.read_text())
        return counts


def about(pid: int) -> dict[str, Any]:
    """Return load, threads, descriptors and state of a process, where the system has /proc."""
    place = Path(f"/proc/{pid}")
    if not place.exists():
        return {}
    status = dict(
        line.split(":\t", 1)
        for line in (place / "status").read_text().splitlines()
        if ":\t" in line
    )
    names = ("State", "Threads", "VmRSS", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return {name: status.get(name, "").strip() for name in names} | {
        "descriptors": len(list((place / "fd").iterdir())), "load": os.getloadavg()[0],
        "threads wait in": dict(Counter(
            (task / "wchan").read_text() for task in (place / "task").iterdir()
        )),
    }  # fmt: skip
