"""Run the commands of tutorial.md, in this process; with ``--write``, put their output into it.

python docs/tutorial_run.py --write       # with the demo model, which it fetches
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from vkv_cli.main import main

PAGE = Path(__file__).with_name("tutorial.md")
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
#: Commands that end with status 1, as they should, by their beginning.
FAILING = ("vkv diff ", "vkv validate bad.vkv")


def commands(block: str) -> list[str]:
    """Return the commands of a block, which begin with ``$``."""
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def run(command: str, model: Path) -> str:
    """Run one command in the current folder, and return what it prints.

    Raises:
        RuntimeError: It ends otherwise than it should.
    """
    if not command.startswith("vkv "):
        subprocess.run(command, shell=True, check=True)
        return ""
    words = [word.replace("$MODEL", str(model)) for word in shlex.split(command)[1:]]
    given = ""
    if "<" in words:
        given = Path(words[words.index("<") + 1]).read_text()
        words = words[: words.index("<")]
    out, before = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(words)
    finally:
        sys.stdin = before
    if (status != 0) != command.startswith(FAILING):
        raise RuntimeError(f"{command}: status {status}\n{out.getvalue()}")
    text = out.getvalue().replace(str(model), "$MODEL")
    return text.replace(f"{Path.cwd()}/", "")


def transcript(page: str, model: Path) -> str:
    """Return the page with the output of its commands, run one after the other."""

    def renewed(match: re.Match[str]) -> str:
        lines = [f"$ {command}\n{run(command, model)}" for command in commands(match[1])]
        return f"```console\n{''.join(lines)}```"

    return BLOCK.sub(renewed, page)


if __name__ == "__main__":
    from vkv.demo.model import smollm2

    made = smollm2()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["COLUMNS"] = "100"
        text = transcript(PAGE.read_text(), made)
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text)
