"""Check every architecture of mlx-lm: ``python -m tests.matrix SDIST [NAME …]``.

SDIST is an unpacked source distribution of mlx-lm. Prints a row for each architecture, and
counts; ends with 1 if anything failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.matrix.checks import Architecture, not_here
from tests.matrix.configs import VARIABLE, Config, configs, source


def row(name: str, config: Config, counts: Counter[str]) -> str:
    """Check one architecture and return its line."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            one = Architecture(name, config, Path(folder))
        except (Exception, SystemExit) as exc:
            if reason := not_here(exc):
                counts[reason] += 1
                return f"{name:24} {reason}"
            counts["not built or saved"] += 1
            return f"{name:24} FAILED to build or save: {_error(exc)}"
        words = []
        for check, result in one.checks():
            failed = isinstance(result, Exception)
            text = f"FAILED {_error(result)}" if isinstance(result, Exception) else result
            counts[f"{check} {'FAILED' if failed else result}"] += 1
            words.append(f"{check}={text}")
    return f"{name:24} {' '.join(words)}"


def _error(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc)[:160]}".replace("\n", " ")


def main(place: str, *names: str) -> int:
    os.environ[VARIABLE] = place
    if (path := source()) is None:
        sys.exit(f"{place} has no tests/test_models.py, expected the source distribution of mlx-lm")
    counts, start, every = Counter[str](), time.perf_counter(), configs(path)
    for name, config in every.items():
        if not names or name in names:
            print(row(name, config, counts), flush=True)
    for text, count in sorted(counts.items()):
        print(f"{count:4} {text}")
    print(f"{len(every)} architectures, {time.perf_counter() - start:.0f} s")
    return int(any("FAILED" in text or "not built" in text for text in counts))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
