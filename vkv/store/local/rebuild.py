"""Build a new index beside the old one, and let it take its place."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection

from vkv.store.local import listing, reconcile, removal
from vkv.store.local.connection import connect, create, uri
from vkv.store.local.index import Index
from vkv.store.local.layout import INDEX, Layout
from vkv.store.local.reconcile import Survey
from vkv.store.local.schema import DEAD, NO_TREE, QUARANTINED, RETAINED

#: A row of the old index, by column.
Recorded = dict[str, object]


def reindex(index: Index) -> list[Path]:
    """Replace the index by one that is built from the files. See ``PromptStore.reindex``.

    The files are read while other processes go on; only what came meanwhile is read again
    under the lock. What no file says is carried over by id.
    """
    with index.layout.staging() as folder:
        path = folder / INDEX
        with _new_index(path) as db:
            create(db, index.layout)
            found = _catch_up(db, index.layout)
            with index.locked_for_replacement():
                found = _catch_up(db, index.layout)
                _carry_over(db, index.layout, found)
                db.close()
                _flush(path)
                _replace(index.layout, path)
    return [*(file.path for file in found.rejected), *found.unread]


@contextlib.contextmanager
def _new_index(path: Path) -> Iterator[Connection]:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    db = connect(uri(path, "mode=rw"))
    try:
        db.execute("PRAGMA synchronous = OFF")  # flushed once, at the end
        yield db
    finally:
        db.close()


def _catch_up(db: Connection, layout: Layout) -> Survey:
    """List files that came, and drop rows whose files went, since the last look."""
    db.execute("BEGIN")
    for number, key in db.execute("SELECT n, id FROM entries").fetchall():
        if not layout.path(key).exists():
            removal.take_out(db, [number])
    found = reconcile.list_files(db, layout)
    db.execute("COMMIT")
    return found


def _carry_over(db: Connection, layout: Layout, found: Survey) -> None:
    """Take pins, times of use and what was removed from the old index, as far as it is readable.

    The rows of files that cannot be read now are taken whole.
    """
    unread = {path.stem for path in found.unread}
    db.execute("BEGIN")
    for row in _recorded(layout):
        if row["id"] in unread:
            _copy_row(db, row)
            continue
        values = (row[name] for name in ("created", "used", "uses", "pinned"))
        listing.set_recorded(db, str(row["id"]), *values)
        _restore_state(db, row)
    db.execute("COMMIT")


def _restore_state(db: Connection, row: Recorded) -> None:
    query = "SELECT * FROM entries WHERE id = ? AND removed = 0"
    if (new := db.execute(query, (row["id"],)).fetchone()) is None:
        return
    if row["removed"] in (RETAINED, DEAD):
        removal.take_out(db, [new["n"]])
    elif row["removed"] == QUARANTINED and str(row["reason"]).startswith(removal.BUILD):
        removal.quarantine(db, new, str(row["reason"]).removeprefix(removal.BUILD))


def _recorded(layout: Layout) -> Iterator[Recorded]:
    """Yield the rows of the old index until one cannot be read."""
    query = """
        SELECT e.*, t.model, t.needs, t.trims FROM entries e LEFT JOIN trees t ON t.id = -e.tree
    """
    if not layout.index.exists():
        return
    try:
        old = connect(uri(layout.index, "mode=ro"))
        old.text_factory = lambda text: text.decode(errors="replace")
        for row in old.execute(query):
            yield dict(zip(row.keys(), row, strict=True))
        old.close()
    except sqlite3.DatabaseError:
        return


def _copy_row(db: Connection, row: Recorded) -> None:
    """Keep the row of an entry whose file cannot be read now; it has no place in a tree yet."""
    from vkv.store.local.prefix_tree import root

    tree = NO_TREE
    if row["model"] is not None:
        tree = root(db, row["model"], row["needs"], row["trims"])  # type: ignore[arg-type]
    kept = {k: v for k, v in row.items() if k not in ("n", "model", "needs", "trims")}
    kept |= {"tree": tree, "node": None}
    names, marks = ", ".join(kept), ", ".join("?" * len(kept))
    db.execute(f"INSERT OR IGNORE INTO entries ({names}) VALUES ({marks})", tuple(kept.values()))


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(layout: Layout, new: Path) -> None:
    """Give the new index the name of the old one, inside ``locked_for_replacement``.

    SQLite neither checkpoints nor removes the log of a database whose file has moved,
    so connections to the old index do no harm to the new one.
    """
    for suffix in ("-wal", "-shm"):
        layout.index.with_name(layout.index.name + suffix).unlink(missing_ok=True)
    os.replace(new, layout.index)
