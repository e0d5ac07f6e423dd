"""Read text that a user gives, and keep the three standard streams usable."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from vkv.errors import VkvError


def open_missing() -> None:
    """Open ``/dev/null`` in place of standard streams that are closed (cron, ``>&-``).

    Without it the next file that is opened would get the number of the missing stream, and
    what is printed would go into that file. Standard input stays ``None``: what is read from
    it is missing, not empty.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd
            if fd:
                setattr(sys, name, open(fd, "w", closefd=False, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a character of a file
        sys.stdout.reconfigure(errors="backslashreplace")


def read_text(path: Path | str, at: str) -> str:
    """Return the text of a file, or of standard input for ``-``; a byte order mark is left out.

    Text is UTF-8 whatever the locale says: other bytes would be other tokens.

    Raises:
        VkvError: It is not UTF-8, or standard input is closed; ``at`` names it.
        OSError: The file cannot be read.
    """
    if str(path) != "-":
        return decoded(Path(path).read_bytes(), at)
    if sys.stdin is None:
        raise VkvError("standard input is closed, expected text", at=at)
    stream = getattr(sys.stdin, "buffer", None)
    return decoded(stream.read(), at) if stream is not None else sys.stdin.read()


def argument(text: str, at: str) -> str:
    """Return a word of the command line, whose bytes must be UTF-8.

    Raises:
        VkvError: They are not; ``at`` names the option.
    """
    return decoded(os.fsencode(text), at) if not text.isascii() else text


def decoded(data: bytes, at: str) -> str:
    """Return ``data`` as text.

    Raises:
        VkvError: It is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise VkvError(f"byte {exc.start} is not UTF-8", at=at) from None
