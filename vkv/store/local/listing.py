"""List files in the index: as entries, or as files that entries depend on.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

from sqlite3 import Connection, Row

from vkv.store.local import prefix_tree
from vkv.store.local.file_check import tokens_of
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import DamagedEntryError
from vkv.store.local.removal import detach, take_out
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
    node = _place(db, layout, tree, what.tokens, unplaced)
    number = int(db.execute(_ADD, _values(what, tree, node, when)).fetchone()[0])
    pairs = [(number, key) for key in what.dependencies]
    db.executemany("INSERT OR IGNORE INTO dependencies (entry, dependency) VALUES (?, ?)", pairs)
    query = "UPDATE entries SET removed = ? WHERE id = ? AND removed = ?"
    db.executemany(query, [(RETAINED, key, DEAD) for key in what.dependencies])
    return number


def _values(what: Description, tree: int, node: int, when: float) -> tuple[object, ...]:
    place = (what.key, what.content, tree, node)
    tokens = (what.size, what.count, what.tokens_at, what.digest)
    return (*place, *tokens, what.label, what.codec, what.name, ",".join(what.tags), when, when)


def _place(db: Connection, layout: Layout, tree: int, tokens: bytes, unplaced: list[str]) -> int:
    while True:
        try:
            return prefix_tree.insert(db, tree, tokens, lambda row: tokens_of(layout, row))
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
