"""Read entries from the index. Every function runs inside a transaction of the caller."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.format.file_id import is_file_id
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import DamagedEntryError
from vkv.store.local.schema import HINT
from vkv.store.results import Entry, Stats

_ENTRY = """
SELECT e.*, t.model,
    (SELECT group_concat(dependency) FROM dependencies WHERE entry = e.n) AS dependencies
FROM entries e JOIN trees t ON t.id = -e.tree WHERE
"""
_KINDS = {
    "size": int, "tokens": int, "model": bytes, "label": str, "codec": str, "name": str,
    "tags": str, "created": float, "used": float, "uses": int,
}  # fmt: skip
_TYPES = ", ".join(f"{name} {kind.__name__}" for name, kind in _KINDS.items())


def entry_of_row(layout: Layout, row: Row) -> Entry:
    """Convert a row of ``entries`` joined with ``trees`` to an ``Entry``.

    Raises:
        DamagedEntryError: A column holds a value of another type.
    """
    try:
        return _entry(layout, row)
    except (VkvError, TypeError, ValueError, AttributeError) as exc:
        raise DamagedEntryError(row, f"the row is not an entry: {exc}; {HINT}") from exc


def _entry(layout: Layout, row: Row) -> Entry:
    if not all(isinstance(row[name], kind) for name, kind in _KINDS.items()):
        raise TypeError(f"a value of another type, expected {_TYPES}")
    return Entry(
        id=row["id"],
        path=layout.path(row["id"]),
        size=row["size"],
        tokens=row["tokens"],
        model=row["model"].hex(),
        label=row["label"],
        codec=row["codec"],
        name=row["name"],
        tags=tuple(row["tags"].split(",")) if row["tags"] else (),
        dependencies=tuple(row["dependencies"].split(",")) if row["dependencies"] else (),
        created=row["created"],
        used=row["used"],
        uses=row["uses"],
        pinned=bool(row["pinned"]),
    )


def all_entries(db: Connection, layout: Layout) -> list[Entry]:
    """Return all live entries, the one used last first."""
    query = f"{_ENTRY} e.removed = 0 ORDER BY e.used DESC, e.n DESC"
    return [entry_of_row(layout, row) for row in db.execute(query)]


def count(db: Connection) -> int:
    """Return the number of live entries."""
    return int(db.execute("SELECT count(*) FROM entries WHERE removed = 0").fetchone()[0])


def by_number(db: Connection, layout: Layout, number: int) -> Entry:
    """Return entry ``number``, live or in quarantine.

    Raises:
        VkvError: There is none, or its row is damaged.
    """
    query = f"{_ENTRY} e.removed IN (0, 3) AND e.n = ?"
    if (row := db.execute(query, (number,)).fetchone()) is None:
        raise VkvError(f"the index names entry number {number}, which it does not hold; {HINT}")
    return entry_of_row(layout, row)


def resolve(db: Connection, key: str) -> int:
    """Return the number of the entry whose id begins with ``key``, or that has this name.

    Raises:
        VkvError: There is none, or more than one.
    """
    query = "SELECT n FROM entries WHERE removed IN (0, 3) AND {} ? LIMIT 2"
    is_id = re.fullmatch("[0-9a-f]{4,64}", key.lower()) is not None
    matches = db.execute(query.format("id GLOB"), (f"{key.lower()}*",)).fetchall() if is_id else []
    if not matches and key:
        matches = db.execute(query.format("name ="), (key,)).fetchall()
    if not (is_id or matches):
        raise VkvError(f"{key!r} is not an id: expected 4 to 64 hex digits, or an entry's name")
    if len(matches) != 1:
        raise VkvError(f"{'no' if not matches else 'more than one'} entry with id {key}")
    return int(matches[0][0])


def with_content(db: Connection, layout: Layout, content: bytes) -> Entry | None:
    """Return the live entry with the same content, if its file exists."""
    query = f"{_ENTRY} e.removed = 0 AND e.content = ?"
    same = map(partial(entry_of_row, layout), db.execute(query, (content,)))
    return next((entry for entry in same if entry.path.exists()), None)


def ids(db: Connection) -> list[str]:
    """Return the ids of all files, also of those that only others depend on."""
    query = "SELECT id FROM entries WHERE removed != 2 ORDER BY id"
    return [key for (key,) in db.execute(query) if is_file_id(key)]


def total_bytes(db: Connection, *, dead: bool = False) -> int:
    """Return the bytes of all files; with ``dead``, of those that ``sweep`` removes instead."""
    which = "= 2" if dead else "!= 2"
    query = f"SELECT coalesce(sum(size), 0) FROM entries WHERE removed {which}"
    return int(db.execute(query).fetchone()[0])


def stats(db: Connection, root: Path, max_bytes: int | None) -> Stats:
    """Sum sizes and counts over all entries."""
    query = """
        SELECT count(*), count(DISTINCT t.model), total(e.tokens), total(e.size * e.pinned)
        FROM entries e JOIN trees t ON t.id = -e.tree WHERE e.removed = 0
    """
    entries, models, tokens, pinned = map(int, db.execute(query).fetchone())
    query = "SELECT total(size) FROM entries WHERE removed = ?"
    retained, quarantined = (int(db.execute(query, (s,)).fetchone()[0]) for s in (1, 3))
    return Stats(
        root, entries, models, tokens, total_bytes(db), pinned, retained, quarantined, max_bytes
    )


def missing(db: Connection, layout: Layout, ids: Iterable[str]) -> list[str]:
    """Return those of some files that the index does not hold or that are gone."""
    query = "SELECT n FROM entries WHERE id = ?"
    return [
        key
        for key in ids
        if not db.execute(query, (key,)).fetchone() or not layout.path(key).exists()
    ]


def dependents(db: Connection, number: int) -> list[int]:
    """Return the numbers of the entries that depend on this one."""
    query = "SELECT entry FROM dependencies WHERE dependency = (SELECT id FROM entries WHERE n = ?)"
    return [n for (n,) in db.execute(query, (number,)).fetchall()]


def set_pinned(db: Connection, layout: Layout, ids: Iterable[str], pinned: bool) -> list[Entry]:
    """Set or clear the pin of entries, and return them. Raises as ``resolve``."""
    numbers = [resolve(db, key) for key in ids]
    for n in numbers:
        db.execute("UPDATE entries SET pinned = ? WHERE n = ?", (pinned, n))
    return [by_number(db, layout, n) for n in numbers]


def live_ids(db: Connection) -> set[str]:
    """Return the ids of all live entries."""
    return {key for (key,) in db.execute("SELECT id FROM entries WHERE removed = 0")}
