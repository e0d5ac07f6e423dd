"""List files in the index: as entries, or as files that entries depend on.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import time
from sqlite3 import Connection, Row

from vkv.store.local import prefix_tree
from vkv.store.local.file_check import tokens_of
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import WIDTH, DamagedEntryError
from vkv.store.local.removal import detach, drop_points, refuse, take_out
from vkv.store.local.schema import DEAD, NO_TREE, RETAINED
from vkv.store.local.summary import Description

_COLUMNS = (
    "id", "content", "tree", "node", "size", "tokens", "tokens_at", "digest", "label", "codec",
    "name", "tags", "created", "used",
)  # fmt: skip
_UPDATED = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[1:-2])
_ADD = f"""
INSERT INTO entries ({", ".join(_COLUMNS)}) VALUES ({", ".join("?" * len(_COLUMNS))})
ON CONFLICT (id) DO UPDATE SET {_UPDATED}, used = max(used, excluded.used), removed = 0, reason = ''
RETURNING n
"""


def add(db: Connection, layout: Layout, what: Description, when: float, unplaced: list[str]) -> int:
    """List a file as an entry; one that was removed and not yet swept comes back.

    Its dependencies must be listed in the same transaction.

    Args:
        db: Of the store.
        layout: Of the store.
        what: The summary of the file.
        when: Time of its last use, in seconds since 1970.
        unplaced: Receives the ids of entries whose tokens were not what the index says.
            They lose their place in the prefix tree; pass them to ``repair``.

    Returns:
        The number of the entry.
    """
    tree = prefix_tree.root(db, what.model, what.needs, what.trims)
    node = _place(db, layout, tree, what.tokens, what, unplaced)
    number = int(db.execute(_ADD, _values(what, tree, node, when)).fetchone()[0])
    place_points(db, layout, tree, number, what, unplaced)
    pairs = [(number, key) for key in what.dependencies]
    db.executemany("INSERT OR IGNORE INTO dependencies (entry, dependency) VALUES (?, ?)", pairs)
    query = "UPDATE entries SET removed = ? WHERE id = ? AND removed = ?"
    db.executemany(query, [(RETAINED, key, DEAD) for key in what.dependencies])
    return number


def _values(what: Description, tree: int, node: int, when: float) -> tuple[object, ...]:
    place = (what.key, what.content, tree, node)
    tokens = (what.size, what.count, what.tokens_at, what.digest)
    return (*place, *tokens, what.label, what.codec, what.name, ",".join(what.tags), when, when)


def place_points(
    db: Connection,
    layout: Layout,
    tree: int,
    number: int,
    what: Description,
    unplaced: list[str],
) -> None:
    """Give the checkpoints of an entry their places in its tree, in place of earlier ones.

    Arguments are those of ``add``; ``tree`` is the root, ``number`` that of the entry.
    """
    drop_points(db, number)
    for count in what.checkpoints:
        node = _place(db, layout, tree, what.tokens[: count * WIDTH], what, unplaced)
        db.execute("INSERT OR IGNORE INTO points (node, entry) VALUES (?, ?)", (node, number))


def _place(
    db: Connection,
    layout: Layout,
    tree: int,
    tokens: bytes,
    what: Description,
    unplaced: list[str],
) -> int:
    """Return the node of some leading tokens of an entry, whose file may have no name yet."""

    def read(row: Row) -> bytes:
        return what.tokens if row["id"] == what.key else tokens_of(layout, row)

    while True:
        try:
            return prefix_tree.insert(db, tree, tokens, read)
        except DamagedEntryError as exc:
            detach(db, exc.row)
            unplaced.append(exc.row["id"])


def relist(db: Connection, layout: Layout, row: Row, what: Description) -> list[str]:
    """List a sound file again of which the index said something wrong; pins and use stay.

    Returns:
        Ids for ``repair``, as ``add`` collects them.
    """
    unplaced: list[str] = []
    detach(db, row)
    db.execute("DELETE FROM dependencies WHERE entry = ?", (row["n"],))
    set_recorded(db, what.key, row["created"], row["used"], row["uses"], row["pinned"])
    add(db, layout, what, 0, unplaced)
    if row["removed"] in (RETAINED, DEAD):
        take_out(db, [row["n"]])
    return unplaced


def set_recorded(db: Connection, key: str, *values: object) -> None:
    """Set what no file says (created, used, uses, pinned); a value of a wrong type becomes 0."""
    kinds = zip(("created", "used", "uses", "pinned"), (float, float, int, int), strict=True)
    for (name, kind), value in zip(kinds, values, strict=True):
        value = value if isinstance(value, kind) else 0
        db.execute(f"UPDATE entries SET {name} = ? WHERE id = ?", (value, key))


def put_aside(db: Connection, key: str, size: int, reason: Exception) -> None:
    """List a file in quarantine whose header breaks a rule; nothing else is known of it."""
    tree = prefix_tree.root(db, b"", "", False)
    query = """
        INSERT INTO entries (id, content, tree, size, tokens, tokens_at, digest, label, codec,
                             created, used)
        VALUES (?, '', ?, ?, 0, 0, '', '', '', ?, ?) ON CONFLICT (id) DO NOTHING
    """
    now = time.time()
    db.execute(query, (key, tree, size, now, now))
    refuse(db, db.execute("SELECT * FROM entries WHERE id = ?", (key,)).fetchone(), reason)


def retain(db: Connection, key: str, size: int) -> int:
    """List a file that is no entry but that entries depend on; return its number."""
    query = f"""
        INSERT INTO entries (id, content, tree, size, tokens, tokens_at, digest, label, codec,
                             created, used, removed)
        VALUES (?, '', {NO_TREE}, ?, 0, 0, '', '', '', 0, 0, ?)
        ON CONFLICT (id) DO UPDATE SET size = excluded.size,
            removed = CASE removed WHEN 2 THEN excluded.removed ELSE removed END RETURNING n
    """
    return int(db.execute(query, (key, size, RETAINED)).fetchone()[0])
