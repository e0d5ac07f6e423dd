"""Entries in the index: entered, found, taken out. Inside a transaction of the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.store import tree
from vkv.store.describe import Description, read_tokens
from vkv.store.entry import Entry
from vkv.store.index import DEAD, HELD, LIVE
from vkv.store.layout import Layout
from vkv.store.tree import DamagedError

#: Told of every entry that is dropped because its file is damaged.
Drop = Callable[[Row, Exception], None]

_ENTRY = """
SELECT e.*, t.model FROM entries e JOIN trees t ON t.id = -e.tree WHERE e.removed = 0
"""


def entry(layout: Layout, row: Row) -> Entry:
    """A row of ``entries`` joined with ``trees`` as an ``Entry``."""
    return Entry(
        id=row["id"],
        path=layout.path(row["id"]),
        size=row["size"],
        tokens=row["tokens"],
        model=row["model"].hex(),
        label=row["label"],
        codec=row["codec"],
        created=row["created"],
        used=row["used"],
        uses=row["uses"],
        pinned=bool(row["pinned"]),
    )


def entries(db: Connection, layout: Layout) -> list[Entry]:
    """All of them, the one used last first."""
    return [entry(layout, row) for row in db.execute(f"{_ENTRY} ORDER BY e.used DESC, e.n DESC")]


def by_number(db: Connection, layout: Layout, number: int) -> Entry:
    return entry(layout, db.execute(f"{_ENTRY} AND e.n = ?", (number,)).fetchone())


def add(db: Connection, layout: Layout, what: Description, when: float, drop: Drop) -> int:
    """Enter a file; its number. One that was taken out and not yet swept comes back."""
    top = tree.root(db, what.model, what.codecs, what.trims)
    node = _insert(db, layout, top, what.tokens, drop)
    query = """
        INSERT INTO entries (id, tree, node, size, tokens, tokens_at, digest, label, codec,
                             created, used)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (id) DO UPDATE SET node = excluded.node, removed = 0,
            used = max(used, excluded.used)
        RETURNING n
    """
    own = (what.key, top, node, what.size, what.count, what.tokens_at, what.digest)
    values = (*own, what.label, what.codec, when, when)
    return int(db.execute(query, values).fetchone()[0])


def _insert(db: Connection, layout: Layout, top: int, tokens: bytes, drop: Drop) -> int:
    while True:
        try:
            return tree.insert(db, top, tokens, lambda row: tokens_of(layout, row))
        except DamagedError as exc:
            take_out(db, [exc.row["n"]])
            drop(exc.row, exc)


def tokens_of(layout: Layout, row: Row) -> bytes:
    """The tokens of an entry, from its file.

    Raises:
        DamagedError: They cannot be read, or have changed.
    """
    try:
        path = layout.path(row["id"])
        return read_tokens(path, row["tokens_at"], row["tokens"], row["digest"])
    except (VkvError, OSError) as exc:
        raise DamagedError(row, str(exc)) from exc


def take_out(db: Connection, numbers: Iterable[int]) -> None:
    """Take entries out of listing and answers; ``sweep`` removes files nobody stands on."""
    for n in numbers:
        query = "UPDATE entries SET removed = ?, node = NULL, pinned = 0 WHERE n = ?"
        node = db.execute("SELECT node FROM entries WHERE n = ?", (n,)).fetchone()[0]
        db.execute(query, (HELD, n))
        if node is not None:
            tree.prune(db, node)
        _release(db, n)


def _release(db: Connection, number: int) -> None:
    """Let the file of a removed entry go if no other stands on it; then those it stood on."""
    ready = [number]
    while ready:
        n = ready.pop()
        state = db.execute("SELECT removed FROM entries WHERE n = ?", (n,)).fetchone()[0]
        stood_on = db.execute("SELECT 1 FROM stands WHERE base = ? LIMIT 1", (n,)).fetchone()
        if state == LIVE or stood_on:
            continue
        db.execute("UPDATE entries SET removed = ? WHERE n = ?", (DEAD, n))
        query = "DELETE FROM stands WHERE entry = ? RETURNING base"
        ready += [base for (base,) in db.execute(query, (n,)).fetchall()]


def sweep(db: Connection, layout: Layout) -> int:
    """Remove the files of dead entries, then the entries; bytes that came free.

    In a transaction of its own, after the one that took them out: a crash between
    leaves files that no listed entry needs, and the next sweep finds them.
    """
    freed = 0
    for n, key, size in db.execute("SELECT n, id, size FROM entries WHERE removed = 2").fetchall():
        layout.path(key).unlink(missing_ok=True)
        db.execute("DELETE FROM entries WHERE n = ?", (n,))
        freed += size
    return freed


def touch(db: Connection, key: str) -> None:
    """Note that an entry was answered."""
    db.execute("UPDATE entries SET used = ?, uses = uses + 1 WHERE id = ?", (time.time(), key))
