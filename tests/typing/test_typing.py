"""A user's calls under ``mypy --strict``, with vkv installed as the typed package it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # mypy reads vkv from scratch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(path: Path, cache: Path) -> str:
    """Return what ``mypy --strict`` says of a user's file, without the settings of this project."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}",
         "--show-error-codes", "--no-error-summary", "--follow-imports=silent", str(path)],
        capture_output=True, text=True, check=False, cwd=cache,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stderr == ""
    return run.stdout


def test_right_calls_pass(tmp_path):
    assert mypy(HERE / "right.py", tmp_path) == ""


def test_each_wrong_call_is_an_error_of_its_kind(tmp_path):
    said = mypy(HERE / "wrong.py", tmp_path)
    found = {int(line): kind for line, kind in re.findall(r":(\d+): error: .*\[([\w-]+)\]", said)}
    lines = (HERE / "wrong.py").read_text().splitlines()
    want = {i: line.split("# error: ")[1] for i, line in enumerate(lines, 1) if "# error: " in line}
    assert found == want, said
