"""Measure the memory of a process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak() -> int:
    """Return the most bytes this process has held.

    ``ru_maxrss`` of a child begins at what its parent held; Linux keeps a count
    that begins with the program.
    """
    if _STATUS.exists():
        line = next(x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
