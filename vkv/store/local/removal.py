"""Take entries out of the index, and remove their files. Inside a transaction of the caller."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from sqlite3 import Connection, Row

from vkv._version import __version__
from vkv.errors import VkvError
from vkv.format.file_id import is_file_id
from vkv.store.local import prefix_tree
from vkv.store.local.entries import dependents
from vkv.store.local.layout import Layout
from vkv.store.local.schema import LIVE, QUARANTINED, RETAINED

_log = logging.getLogger("vkv.store")

#: How the reason of an entry in quarantine begins: another build tries it again.
BUILD = f"vkv {__version__}: "


def take_out(db: Connection, numbers: Iterable[int]) -> int:
    """Take entries out of listings and searches.

    ``sweep`` then removes the files that no entry depends on; the others stay until no
    entry does.

    Returns:
        Bytes that ``sweep`` will free.
    """
    freed = 0
    for n in numbers:
        query = "SELECT node FROM entries WHERE n = ? AND removed IN (?, ?)"
        if row := db.execute(query, (n, LIVE, QUARANTINED)).fetchone():
            query = "UPDATE entries SET removed = ?, node = NULL, pinned = 0 WHERE n = ?"
            db.execute(query, (RETAINED, n))
            drop_points(db, n)
            if isinstance(row[0], int):
                prefix_tree.prune(db, row[0])
        freed += release(db, n)
    return freed


_RELEASE = """
UPDATE entries SET removed = 2 WHERE n = ? AND removed = 1
AND NOT EXISTS (SELECT 1 FROM dependencies d WHERE d.dependency = entries.id) RETURNING size
"""


def release(db: Connection, number: int) -> int:
    """Mark a removed file as dead if no entry depends on it, then its own dependencies.

    Returns:
        Their bytes.
    """
    ready, freed = [number], 0
    while ready:
        n = ready.pop()
        if (row := db.execute(_RELEASE, (n,)).fetchone()) is None:
            continue
        freed += row[0]
        query = "DELETE FROM dependencies WHERE entry = ? RETURNING dependency"
        released = db.execute(query, (n,)).fetchall()
        query = "SELECT n FROM entries WHERE id = ?"
        ready += [m for (key,) in released for (m,) in db.execute(query, (key,))]
    return freed


def detach(db: Connection, row: Row) -> None:
    """Take an entry out of its prefix tree, whatever else the index says of it."""
    db.execute("UPDATE entries SET node = NULL WHERE n = ?", (row["n"],))
    drop_points(db, row["n"])
    if isinstance(row["node"], int):
        prefix_tree.prune(db, row["node"])


def drop_points(db: Connection, number: int) -> None:
    """Take the checkpoints of an entry out of its tree."""
    query = "DELETE FROM points WHERE entry = ? RETURNING node"
    for (node,) in db.execute(query, (number,)).fetchall():
        prefix_tree.prune(db, node)


def quarantine(db: Connection, row: Row, reason: str) -> None:
    """Put an entry aside that cannot be loaded: its file stays, no search returns it."""
    detach(db, row)
    query = "UPDATE entries SET removed = ?, reason = ? WHERE n = ? AND removed IN (?, ?)"
    values = (QUARANTINED, f"{BUILD}{reason}", row["n"], LIVE, QUARANTINED)
    db.execute(query, values)
    _log.warning("%s cannot be loaded and was put aside: %s", row["id"], reason)


def refuse(db: Connection, row: Row, reason: Exception) -> None:
    """Put an entry aside whose file breaks a rule, with the entries that depend on it."""
    quarantine(db, row, str(reason))
    for n in dependents(db, row["n"]):
        query = "SELECT * FROM entries WHERE n = ? AND removed = ?"
        if other := db.execute(query, (n, LIVE)).fetchone():
            quarantine(db, other, f"depends on {row['id']}, which was put aside: {reason}")


def drop(db: Connection, row: Row, reason: Exception) -> None:
    """Take out an entry whose file is damaged, and what depends on it; log one line."""
    detach(db, row)
    others = dependents(db, row["n"])
    query = "SELECT id FROM entries WHERE n = ? AND removed IN (0, 3)"
    names = [key for n in others for (key,) in db.execute(query, (n,))]
    tail = f"; with it what depends on it: {', '.join(names)}" if names else ""
    _log.warning("%s is damaged and was taken out: %s%s", row["id"], reason, tail)
    take_out(db, [*others, row["n"]])


def purge(db: Connection) -> None:
    """Delete rows whose id is not an id; no file is touched for them."""
    for row in db.execute("SELECT * FROM entries").fetchall():
        if not is_file_id(row["id"]):
            detach(db, row)
            db.execute("DELETE FROM dependencies WHERE entry = ?", (row["n"],))
            db.execute("DELETE FROM entries WHERE n = ?", (row["n"],))


def sweep(db: Connection, layout: Layout) -> None:
    """Remove the files of dead entries, then their rows.

    Call it in a transaction of its own, after the one that took them out: a crash between
    the two leaves files that no listed entry needs, and the next sweep removes them.
    """
    for row in db.execute("SELECT n, id, node FROM entries WHERE removed = 2").fetchall():
        with contextlib.suppress(OSError, VkvError):  # then it waits for the next sweep
            if is_file_id(row["id"]):  # no file belongs to any other
                layout.remove(row["id"])
            detach(db, row)
            db.execute("DELETE FROM entries WHERE n = ?", (row["n"],))


def dead_ids(db: Connection) -> list[str]:
    """Return the ids whose files ``sweep`` removes."""
    return [
        key for (key,) in db.execute("SELECT id FROM entries WHERE removed = 2") if is_file_id(key)
    ]


def remove_files(layout: Layout, ids: Iterable[str]) -> None:
    """Remove the files of some ids."""
    for key in ids:
        with contextlib.suppress(OSError, VkvError):
            layout.remove(key)
