"""Entries in the index: entered, found, taken out. Inside a transaction of the caller's."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.format.document import Document, open_document
from vkv.format.file_id import is_file_id
from vkv.store.local import prefix_tree as tree
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import DamagedError
from vkv.store.local.summary import Description, of, read_tokens
from vkv.store.results import Entry, Stats

#: ``removed``: 0 an entry; 1 taken out, but others stand on it; 2 its file may go.
LIVE, HELD, DEAD = range(3)
SCHEMA = (
    tree.SCHEMA
    + """
CREATE TABLE entries (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content BLOB NOT NULL,
    tree INTEGER NOT NULL, node INTEGER,
    size INTEGER NOT NULL, tokens INTEGER NOT NULL, tokens_at INTEGER NOT NULL,
    digest BLOB NOT NULL, label TEXT NOT NULL, codec TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX entries_by_node ON entries (node);
CREATE INDEX entries_by_use ON entries (removed, used, size);
CREATE INDEX entries_by_content ON entries (content);
CREATE TABLE stands (entry INTEGER NOT NULL, base TEXT NOT NULL, PRIMARY KEY (entry, base))
    WITHOUT ROWID;
CREATE INDEX stands_by_base ON stands (base);
PRAGMA user_version = 1;
"""
)

_log = logging.getLogger("vkv.store")
#: What helps whenever the index is not what this module wrote.
HINT = "`vkv store reindex` makes the index again from the files"

_ENTRY = """
SELECT e.*, t.model, (SELECT group_concat(base) FROM stands WHERE entry = e.n) AS bases
FROM entries e JOIN trees t ON t.id = -e.tree WHERE e.removed = 0
"""


def entry(layout: Layout, row: Row) -> Entry:
    """A row of ``entries`` joined with ``trees`` as an ``Entry``.

    Raises:
        DamagedError: It cannot be one.
    """
    try:
        return _entry(layout, row)
    except (VkvError, TypeError, ValueError, AttributeError) as exc:
        raise DamagedError(row, f"a row that is no entry: {exc}; {HINT}") from exc


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
        files=tuple(row["bases"].split(",")) if row["bases"] else (),
        created=row["created"],
        used=row["used"],
        uses=row["uses"],
        pinned=bool(row["pinned"]),
    )


_KINDS = {
    "size": int, "tokens": int, "model": bytes, "label": str, "codec": str, "created": float,
    "used": float, "uses": int,
}  # fmt: skip
_TYPES = ", ".join(f"{name} {kind.__name__}" for name, kind in _KINDS.items())


def entries(db: Connection, layout: Layout) -> list[Entry]:
    """All of them, the one used last first."""
    return [entry(layout, row) for row in db.execute(f"{_ENTRY} ORDER BY e.used DESC, e.n DESC")]


def resolve(db: Connection, key: str) -> int:
    """The number of the entry whose id begins with ``key``.

    Raises:
        VkvError: There is none, or more than one.
    """
    if not re.fullmatch("[0-9a-f]{4,64}", key.lower()):
        raise VkvError(f"{key!r} is not an id: expected 4 to 64 hex digits")
    query = "SELECT n FROM entries WHERE removed = 0 AND id GLOB ? LIMIT 2"
    found = db.execute(query, (f"{key.lower()}*",)).fetchall()
    if len(found) != 1:
        raise VkvError(f"{'no' if not found else 'more than one'} entry with id {key}")
    return int(found[0][0])


def total(db: Connection, *, dead: bool = False) -> int:
    """Bytes of all files; with ``dead``, of those that ``sweep`` removes instead."""
    which = "= 2" if dead else "IN (0, 1)"
    found = db.execute(f"SELECT coalesce(sum(size), 0) FROM entries WHERE removed {which}")
    return int(found.fetchone()[0])


def ids(db: Connection) -> list[str]:
    """Ids of all files, also of those that only others stand on."""
    query = "SELECT id FROM entries WHERE removed < 2 ORDER BY id"
    return [key for (key,) in db.execute(query) if is_file_id(key)]


def purge(db: Connection) -> None:
    """Drop rows whose id is none; no file is touched for them."""
    for row in db.execute("SELECT * FROM entries").fetchall():
        if not is_file_id(row["id"]):
            detach(db, row)
            db.execute("DELETE FROM stands WHERE entry = ?", (row["n"],))
            db.execute("DELETE FROM entries WHERE n = ?", (row["n"],))


def detach(db: Connection, row: Row) -> None:
    """Take an entry out of its tree, whatever else the index says of it."""
    db.execute("UPDATE entries SET node = NULL WHERE n = ?", (row["n"],))
    if isinstance(row["node"], int):
        tree.prune(db, row["node"])


def stats(db: Connection, root: Path, max_bytes: int | None) -> Stats:
    """Sums over all entries."""
    query = """
        SELECT count(*), count(DISTINCT t.model), total(e.tokens), total(e.size * e.pinned)
        FROM entries e JOIN trees t ON t.id = -e.tree WHERE e.removed = 0
    """
    count, models, tokens, pinned = map(int, db.execute(query).fetchone())
    held = db.execute("SELECT total(size) FROM entries WHERE removed = 1").fetchone()[0]
    return Stats(root, count, models, tokens, total(db), pinned, int(held), max_bytes)


def by_number(db: Connection, layout: Layout, number: int) -> Entry:
    """Entry ``number``.

    Raises:
        VkvError: It is none, or its row is damaged.
    """
    if (row := db.execute(f"{_ENTRY} AND e.n = ?", (number,)).fetchone()) is None:
        raise VkvError(f"no entry has number {number}, which the tree names; {HINT}")
    return entry(layout, row)


def add(db: Connection, layout: Layout, what: Description, when: float) -> int:
    """Enter a file; its number. One that was taken out and not yet swept comes back.

    What it stands on must be, or come, in the index too, and stays for its sake. Sound
    files of which the index speaks wrongly, met on the way, are entered anew.
    """
    met: dict[str, Description] = {}
    number = _add(db, layout, what, when, met)
    done: set[str] = set()
    while left := met.keys() - done:
        key = min(left)
        done.add(key)
        _add(db, layout, met[key], 0, met)
    return number


def _add(
    db: Connection, layout: Layout, what: Description, when: float, met: dict[str, Description]
) -> int:
    top = tree.root(db, what.model, what.needs, what.trims)
    node = _insert(db, layout, top, what.tokens, met)
    query = """
        INSERT INTO entries (id, content, tree, node, size, tokens, tokens_at, digest, label,
                             codec, created, used)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (id) DO UPDATE SET content = excluded.content, tree = excluded.tree,
            node = excluded.node, size = excluded.size, tokens = excluded.tokens,
            tokens_at = excluded.tokens_at, digest = excluded.digest, label = excluded.label,
            codec = excluded.codec, used = max(used, excluded.used), removed = 0
        RETURNING n
    """
    own = (what.key, what.content, top, node, what.size, what.count, what.tokens_at, what.digest)
    values = (*own, what.label, what.codec, when, when)
    number = int(db.execute(query, values).fetchone()[0])
    pairs = [(number, base) for base in what.bases]
    db.executemany("INSERT OR IGNORE INTO stands (entry, base) VALUES (?, ?)", pairs)
    query = "UPDATE entries SET removed = ? WHERE id = ? AND removed = ?"
    db.executemany(query, [(HELD, base, DEAD) for base in what.bases])
    return number


def _insert(
    db: Connection, layout: Layout, top: int, tokens: bytes, met: dict[str, Description]
) -> int:
    while True:
        try:
            return tree.insert(db, top, tokens, lambda row: tokens_of(layout, row))
        except DamagedError as exc:
            row = exc.row
            if row["id"] in met:
                raise VkvError(f"{row['id']} is damaged again after it was mended; {HINT}") from exc
            if (what := ask(layout, row["id"])) is None:
                drop(db, row, exc)
            else:
                detach(db, row)
                met[what.key] = what


def mend(db: Connection, layout: Layout, row: Row) -> Description | None:
    """Enter the file of a row anew, unless it is damaged too; what it is.

    Raises:
        OSError: It cannot be read now.
    """
    if (what := ask(layout, row["id"])) is not None:
        _log.warning("%s is sound; the index spoke wrongly of it and was mended", row["id"])
        detach(db, row)
        db.execute("DELETE FROM stands WHERE entry = ?", (row["n"],))
        keep(db, what.key, row["created"], row["used"], row["uses"], row["pinned"])
        add(db, layout, what, 0)
    return what


def keep(db: Connection, key: str, *values: object) -> None:
    """Set what no file tells (created, used, uses, pinned), as far as it can be that."""
    kinds = zip(("created", "used", "uses", "pinned"), (float, float, int, int), strict=True)
    for (name, kind), value in zip(kinds, values, strict=True):
        value = value if isinstance(value, kind) else 0
        db.execute(f"UPDATE entries SET {name} = ? WHERE id = ?", (value, key))


def ask(layout: Layout, key: str) -> Description | None:
    """What a file says of itself, if every byte of it is as it was written.

    The index follows from the files: on its word alone none is removed.

    Raises:
        OSError: It cannot be read now, which says nothing against it.
    """
    try:
        with open_document(layout.path(key)) as document:
            return of(document) if _sound(document, key) else None
    except (VkvError, FileNotFoundError):
        return None


def hold_again(db: Connection, layout: Layout, key: str) -> bool:
    """Correct the size of a file that is only stood on, if it is sound; raises as ``ask``."""
    try:
        with open_document(layout.path(key)) as document:
            if not _sound(document, key):
                return False
            db.execute("UPDATE entries SET size = ? WHERE id = ?", (document.size, key))
            return True
    except (VkvError, FileNotFoundError):
        return False


def _sound(document: Document, key: str) -> bool:
    document.check_all()
    return document.id == key


def tokens_of(layout: Layout, row: Row) -> bytes:
    """The tokens of an entry, from its file.

    Raises:
        DamagedError: They cannot be read, or have changed.
    """
    try:
        path = layout.path(row["id"])
        return read_tokens(path, row["tokens_at"], row["tokens"], row["digest"])
    except (VkvError, FileNotFoundError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedError(row, str(exc)) from exc


def take_out(db: Connection, numbers: Iterable[int]) -> int:
    """Take entries out of listing and answers; ``sweep`` removes files nobody stands on.

    The files of the others stay until nobody does.

    Returns:
        Bytes that ``sweep`` will free.
    """
    freed = 0
    for n in numbers:
        query = "SELECT node FROM entries WHERE n = ? AND removed = ?"
        if found := db.execute(query, (n, LIVE)).fetchone():
            query = "UPDATE entries SET removed = ?, node = NULL, pinned = 0 WHERE n = ?"
            db.execute(query, (HELD, n))
            if isinstance(found[0], int):
                tree.prune(db, found[0])
        freed += release(db, n)
    return freed


_RELEASE = """
UPDATE entries SET removed = 2 WHERE n = ? AND removed = 1
AND NOT EXISTS (SELECT 1 FROM stands s WHERE s.base = entries.id) RETURNING size
"""


def release(db: Connection, number: int) -> int:
    """Let a removed file go if no other stands on it, then those it stood on; their bytes."""
    ready, freed = [number], 0
    while ready:
        n = ready.pop()
        if (found := db.execute(_RELEASE, (n,)).fetchone()) is None:
            continue
        freed += found[0]
        query = "DELETE FROM stands WHERE entry = ? RETURNING base"
        bases = db.execute(query, (n,)).fetchall()
        ready += [m for (base,) in bases for (m,) in db.execute(_NUMBER, (base,))]
    return freed


_NUMBER = "SELECT n FROM entries WHERE id = ?"


def dependents(db: Connection, number: int) -> list[int]:
    """Entries that stand on this one."""
    query = "SELECT entry FROM stands WHERE base = (SELECT id FROM entries WHERE n = ?)"
    return [n for (n,) in db.execute(query, (number,)).fetchall()]


def with_content(db: Connection, layout: Layout, content: bytes) -> Entry | None:
    """The entry that holds the same, if its file is there."""
    found = map(partial(entry, layout), db.execute(f"{_ENTRY} AND e.content = ?", (content,)))
    return next((same for same in found if same.path.exists()), None)


def missing(db: Connection, layout: Layout, bases: Iterable[str]) -> list[str]:
    """Those of some files that are not there to stand on."""
    return [
        base
        for base in bases
        if not db.execute(_NUMBER, (base,)).fetchone() or not layout.path(base).exists()
    ]


def hold(db: Connection, key: str, size: int) -> int:
    """Enter a file that is no entry but that entries stand on; its number."""
    query = """
        INSERT INTO entries (id, content, tree, size, tokens, tokens_at, digest, label, codec,
                             created, used, removed)
        VALUES (?, '', 0, ?, 0, 0, '', '', '', 0, 0, ?)
        ON CONFLICT (id) DO UPDATE SET removed = min(removed, excluded.removed) RETURNING n
    """
    return int(db.execute(query, (key, size, HELD)).fetchone()[0])


def drop(db: Connection, row: Row, reason: Exception) -> None:
    """Take out an entry whose file is damaged, and what stands on it; say so in one line."""
    detach(db, row)
    others = dependents(db, row["n"])
    query = "SELECT id FROM entries WHERE n = ? AND removed = ?"
    names = [key for n in others for (key,) in db.execute(query, (n, LIVE))]
    tail = f"; with it what stands on it: {', '.join(names)}" if names else ""
    _log.warning("%s is damaged and was taken out: %s%s", row["id"], reason, tail)
    take_out(db, [*others, row["n"]])


def sweep(db: Connection, layout: Layout) -> None:
    """Remove the files of dead entries, then the entries.

    In a transaction of its own, after the one that took them out: a crash between
    leaves files that no listed entry needs, and the next sweep finds them.
    """
    for row in db.execute("SELECT n, id, node FROM entries WHERE removed = 2").fetchall():
        n, key = row["n"], row["id"]
        with contextlib.suppress(OSError, VkvError):  # then it waits for the next sweep
            if is_file_id(key):  # of any other, no file is ours
                layout.remove(key)
            detach(db, row)
            db.execute("DELETE FROM entries WHERE n = ?", (n,))


def touch(db: Connection, key: str) -> None:
    """Note that an entry was used."""
    db.execute("UPDATE entries SET used = ?, uses = uses + 1 WHERE id = ?", (time.time(), key))
