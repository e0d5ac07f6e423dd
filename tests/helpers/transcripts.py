"""Write docs/output.md, what commands print: ``python -m tests.helpers.transcripts``."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from vkv_cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "output.md"
FIXTURES = ROOT / "fixtures" / "v1"
WIDTHS = (60, 80, 120)
#: Title, command, and the widths it is shown at.
SHOWN = (
    ("One file", "inspect good/basis-child.vkv", WIDTHS),
    ("Checkpoints", "inspect good/checkpoints-affine.vkv", (80,)),
    ("Several files", "inspect good/tc-head.vkv good/tc-joint.vkv good/raw-mixed.vkv", WIDTHS),
    ("Every layer, and bytes by tensor", "inspect --layers good/rope-segments.vkv", (80,)),
    ("Two files with values", "diff --deep good/rope-base.vkv good/rope-partial.vkv", WIDTHS),
    ("A damaged file", "validate bad/D1-codebook.vkv", (80,)),
    ("A rule", "explain C2", (60, 80)),
    ("Which codec", "codecs", WIDTHS),
    ("The options of one codec", "codecs affine", (60, 80)),
)  # fmt: skip
HEAD = """\
# What commands print

On files of `fixtures/v1`, at the widths of 60, 80 and 120 columns. A test runs the commands and
compares; nothing is written by hand (`python -m tests.helpers.transcripts`). Colours are for a
terminal alone, and for none if `NO_COLOR` is set. In a pipe nothing is cut, unless `COLUMNS` is
set.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *(line for row in SHOWN for line in _section(*row))])


def _section(title: str, command: str, widths: tuple[int, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    for width in widths:
        yield f"{width} columns:\n"
        yield f"```\n$ vkv {command}\n{printed(command, width)}```\n"


def printed(command: str, width: int) -> str:
    """Return what a command prints in ``fixtures/v1``, at a width."""
    out, before, environment = io.StringIO(), Path.cwd(), dict(os.environ)
    os.environ |= {"COLUMNS": str(width)}
    os.environ.pop("FORCE_COLOR", None)
    os.chdir(FIXTURES)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(command.split())
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
    return re.sub(r"[ ]+$", "", out.getvalue(), flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
