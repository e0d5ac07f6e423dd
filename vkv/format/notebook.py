"""Write small tables of HTML for notebooks; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from vkv.sources.urls import is_url, shown

#: Characters shown of a text, which a file may have chosen.
LONGEST = 200


def place(path: str) -> str:
    """Return a path as it is, and a URL without what may be secret."""
    return shown(path) if is_url(path) else path


def facts(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values under a title; empty values are left out."""
    cells = [
        f'<tr><th style="text-align:left">{_text(name)}</th>'
        f'<td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in rows
        if value not in ("", None)
    ]
    return f"<table><caption>{_text(title)}</caption>{''.join(cells)}</table>"


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a header row."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{_text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<table><caption>{_text(title)}</caption><tr>{head}</tr>{body}</table>"


def _text(value: object) -> str:
    words = str(value)
    return escape(words if len(words) <= LONGEST else f"{words[:LONGEST]}…")
