"""Count the files that this process has open."""

from __future__ import annotations

import gc
import os


def open_files() -> list[str]:
    """Return the names of open files that lie on a disk; needs ``/dev/fd``."""
    gc.collect()
    names = []
    for fd in os.listdir("/dev/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself, or a system without /proc
            continue
    return sorted(n for n in names if n.startswith("/") and not n.startswith(("/dev", "/proc")))
