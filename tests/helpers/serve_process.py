"""``vkv serve`` as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Process:
    """Started and ready; ``url`` is where its API is, ``log()`` what it has said.

    Args:
        place: A directory for its log.
        args: Of the command.
        script: What to run instead of the module ``vkv_cli``.
        env: Variables to set for it.
    """

    def __init__(
        self,
        place: Path,
        *args: object,
        script: Path | None = None,
        env: dict[str, str] | None = None,
    ):
        self._log = place / f"serve-{time.monotonic_ns()}.log"
        run = ["-m", "vkv_cli"] if script is None else [str(script)]
        command = [sys.executable, *run, "serve", "--port", "0", *map(str, args)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | (env or {}))
        while " is ready" not in self.log():
            if self.process.poll() is not None:
                raise RuntimeError(self.log())
            time.sleep(0.05)
        self.url = self.log().partition(" is ready")[0].splitlines()[-1]

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has said ``text``."""
        deadline = time.monotonic() + 60
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
