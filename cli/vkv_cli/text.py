"""Plain text for the terminal: sizes, tables, JSON. No rich here: it costs 80 ms to import."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


def size(count: int) -> str:
    """``1234567`` as ``1.23 MB``; three digits, powers of 1000."""
    value, unit = float(count), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} byte" if count == 1 else f"{count} bytes"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def exact_size(count: int) -> str:
    """``1.23 MB (1,234,567 bytes)``."""
    return size(count) if count < 1000 else f"{size(count)} ({count:,} bytes)"


def table(rows: Iterable[Sequence[str]], right: Iterable[int] = (), gap: str = "  ") -> list[str]:
    """Lines of ``rows``, whose columns are as wide as their widest cell.

    Args:
        rows: Cells; the last column is not padded.
        right: Columns flush right.
        gap: Between columns.
    """
    rows, right = list(rows), set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(cells).rstrip())
    return lines


def printable(text: str) -> str:
    """``text`` with control characters escaped: a file's words must not move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def echo_json(data: dict[str, Any]) -> None:
    """One object on one line, so that several files give a stream that ``jq`` reads."""
    click.echo(json.dumps(data, ensure_ascii=False))
