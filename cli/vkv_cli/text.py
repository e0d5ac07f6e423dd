"""Plain text for the terminal: sizes, printable characters, JSON."""

from __future__ import annotations

import json
from typing import Any

import click

#: Characters shown of a text in a file; and in a column that others stand right of.
LONG, WIDE = 1000, 120
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


def size(count: int) -> str:
    """Return ``1234567`` as ``1.23 MB``; three digits, powers of 1000."""
    value, unit = float(count), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} byte" if count == 1 else f"{count} bytes"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def exact_size(count: int) -> str:
    """Return a size like ``1.23 MB (1,234,567 bytes)``."""
    return size(count) if count < 1000 else f"{size(count)} ({count:,} bytes)"


def printable(text: str, limit: int = LONG) -> str:
    """Return ``text``, which a file may have chosen, fit for a terminal.

    Control characters are escaped, since they move the cursor; so are halves of characters.
    What is beyond ``limit`` is left out.
    """
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_line(data: dict[str, Any]) -> str:
    """Return one object on one line, so that several files give a stream that ``jq`` reads.

    All but ASCII is escaped: no text in it moves the cursor, and every encoding has it.
    """
    return json.dumps(data).replace("\x7f", "\\u007f")


def echo_json(data: dict[str, Any]) -> None:
    """Print one object on one line, as ``json_line`` makes it."""
    click.echo(json_line(data))
