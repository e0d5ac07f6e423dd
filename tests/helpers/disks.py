"""Small disks, to be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path | None]:
    """Mount a file system of that size, where the system allows it; else yield ``None``."""
    place.mkdir()
    mounted = sys.platform == "linux" and os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)],
        check=False, capture_output=True,
    ).returncode  # fmt: skip
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
