"""Find the longest stored prefix of a prompt: a compact tree over token ids, in SQLite.

There is one tree for each model, for each set of things a reader must know, and for
caches that can be trimmed and that cannot. A node stands where two stored prompts
part, where one ends, or at a checkpoint of one; the edge to it is named by its first
token alone, the others are in the files. So n prompts make at most 2n nodes, and one for
each checkpoint, however long they are, and a search is one statement that visits the
nodes on its path, followed by one comparison with the tokens of a prompt below.
(Morrison, PATRICIA, 1968.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from sqlite3 import Connection, Row
from typing import Any

from vkv.errors import VkvError

#: Bytes of a token id.
WIDTH = 4

TABLES = """
CREATE TABLE trees (
    id INTEGER PRIMARY KEY, model BLOB NOT NULL, needs TEXT NOT NULL, trims INTEGER NOT NULL,
    UNIQUE (model, needs, trims));
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, token BLOB NOT NULL, depth INTEGER NOT NULL);
CREATE UNIQUE INDEX nodes_by_path ON nodes (parent, token, depth);
"""
#: Checkpoints of entries: the node that each stands at.
POINTS = """
CREATE TABLE points (node INTEGER NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (node, entry))
    WITHOUT ROWID;
CREATE INDEX points_by_entry ON points (entry);
"""

#: Nodes on the path of a prompt, judged by the first token of each edge. Here and below,
#: depths that grow let no cycle in a broken index go on for ever.
_DESCEND = """
WITH RECURSIVE path (id, depth) AS (
    SELECT :root, 0
    UNION ALL
    SELECT n.id, n.depth FROM path JOIN nodes n
    ON n.parent = path.id AND n.token = substr(:tokens, 4 * path.depth + 1, 4)
    AND n.depth > path.depth)
SELECT id, depth FROM path
"""
#: The first entry met from a node downwards; every leaf of the tree has one.
_BELOW = """
WITH RECURSIVE down (id, depth) AS (
    SELECT :node, coalesce((SELECT depth FROM nodes WHERE id = :node), 0)
    UNION ALL
    SELECT n.id, n.depth FROM down JOIN nodes n ON n.id =
        (SELECT c.id FROM nodes c WHERE c.parent = down.id AND c.depth > down.depth LIMIT 1)
    WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.node = down.id))
SELECT e.* FROM down CROSS JOIN entries e ON e.node = down.id ORDER BY e.used DESC LIMIT 1
"""
#: The same among entries that are not excluded: all nodes below are visited until one has any.
_BELOW_EXCEPT = """
WITH RECURSIVE down (id, depth) AS (
    SELECT :node, coalesce((SELECT depth FROM nodes WHERE id = :node), 0)
    UNION ALL
    SELECT n.id, n.depth FROM down JOIN nodes n ON n.parent = down.id AND n.depth > down.depth)
SELECT e.* FROM down CROSS JOIN entries e ON e.node = down.id
WHERE e.n NOT IN ({excluded}) LIMIT 1
"""

#: Reads the token bytes of an entry.
ReadTokens = Callable[[Row], bytes]
#: Numbers of entries that a search leaves out.
Excluded = frozenset[int]


class DamagedEntryError(VkvError):
    """Report that the tokens of the entry of ``row`` cannot be read."""

    def __init__(self, row: Row, reason: str):
        super().__init__(reason)
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:
        return VkvError, (self.message,)  # a row of SQLite cannot be pickled


@dataclass(frozen=True, slots=True)
class Descent:
    """Describe how far a tree follows a prompt.

    Attributes:
        path: Nodes whose whole prefix the prompt has, from the root, as (id, depth).
        common: Tokens that the prompt shares with some entry; no entry shares more.
        exit: The first node at or behind ``common``: all entries below share as much.
        other: Tokens of one of them.
    """

    path: list[tuple[int, int]]
    common: int
    exit: int
    other: bytes


def root(db: Connection, model: bytes, needs: str, trims: bool) -> int:
    """Return the root of a tree, which is made if it is new.

    Roots are negative numbers, other nodes positive ones.
    """
    key = (model, needs, trims)
    db.execute("INSERT OR IGNORE INTO trees (model, needs, trims) VALUES (?, ?, ?)", key)
    found = db.execute("SELECT id FROM trees WHERE (model, needs, trims) = (?, ?, ?)", key)
    return -int(found.fetchone()[0])


def search(
    db: Connection, tree: int, tokens: bytes, read: ReadTokens, excluded: Excluded = frozenset()
) -> Descent:
    """Follow ``tokens`` (little-endian u32) down the tree with root ``tree``.

    Args:
        db: Of the store.
        tree: Number of the root.
        tokens: Of the prompt.
        read: Reads the tokens of the one entry that the prompt is compared with.
        excluded: Entries to leave out, as if they were not in the tree.

    Raises:
        DamagedEntryError: The entry to compare with cannot be read.
    """
    steps = db.execute(_DESCEND, {"root": tree, "tokens": tokens}).fetchall()
    path = [(int(node), int(depth)) for node, depth in steps]
    while len(path) > 1 and (row := below(db, path[-1][0], excluded)) is None:
        path.pop()
    if len(path) == 1:
        return Descent(path, 0, tree, b"")
    assert row is not None
    other = read(row)
    common = common_bytes(tokens, other) // WIDTH
    inside = [step for step in path if step[1] <= common]
    leaving = inside[-1] if inside[-1][1] == common else path[len(inside)]
    return Descent(inside, common, leaving[0], other)


def below(db: Connection, node: int, excluded: Excluded = frozenset()) -> Row | None:
    """Return an entry at ``node`` or below it; of several at one node the one used last.

    Returns:
        ``None`` if all of them are excluded.

    Raises:
        VkvError: There is none at all: the tree is broken.
    """
    query = _BELOW_EXCEPT.format(excluded=", ".join(map(str, excluded))) if excluded else _BELOW
    row: Row | None = db.execute(query, {"node": node}).fetchone()
    if row is None and not excluded:
        raise VkvError(f"node {node} leads to no entry; `vkv store reindex` builds a new index")
    return row


def insert(db: Connection, tree: int, tokens: bytes, read: ReadTokens) -> int:
    """Return the node where ``tokens`` end, which is made if it is new.

    Raises:
        DamagedEntryError: As ``search``; nothing has been changed.
    """
    descent = search(db, tree, tokens, read)
    parent, depth = descent.path[-1]
    if depth < descent.common:
        parent = _split(db, descent)
    count = len(tokens) // WIDTH
    if count == descent.common:
        return parent
    return _node(db, parent, _token(tokens, descent.common), count)


def _split(db: Connection, descent: Descent) -> int:
    """Make a node in the middle of the edge to ``descent.exit``."""
    parent, token = db.execute(
        "SELECT parent, token FROM nodes WHERE id = ?", (descent.exit,)
    ).fetchone()
    branch = (descent.exit, _token(descent.other, descent.common))
    db.execute("UPDATE nodes SET parent = 0, token = ? WHERE id = ?", (branch[1], descent.exit))
    middle = _node(db, parent, token, descent.common)
    db.execute("UPDATE nodes SET parent = ? WHERE id = ?", (middle, descent.exit))
    return middle


def _node(db: Connection, parent: int, token: bytes, depth: int) -> int:
    made = db.execute(
        "INSERT INTO nodes (parent, token, depth) VALUES (?, ?, ?)", (parent, token, depth)
    )
    assert made.lastrowid is not None
    return made.lastrowid


def prune(db: Connection, node: int) -> None:
    """Remove the nodes that are not needed after an entry has left ``node``."""
    while node > 0 and not _ends(db, node):
        query = "SELECT id FROM nodes WHERE parent = ? LIMIT 2"
        children = db.execute(query, (node,)).fetchall()
        if len(children) == 2:
            return
        query = "DELETE FROM nodes WHERE id = ? RETURNING parent, token"
        if (gone := db.execute(query, (node,)).fetchone()) is None:  # the index is broken
            return
        parent, token = gone
        if children:  # its edge and the one below become one
            query = "UPDATE nodes SET parent = ?, token = ? WHERE id = ?"
            db.execute(query, (parent, token, children[0][0]))
            return
        node = parent


def _ends(db: Connection, node: int) -> Any:
    query = """
        SELECT 1 FROM entries WHERE node = :node UNION ALL SELECT 1 FROM points WHERE node = :node
    """
    return db.execute(query, {"node": node}).fetchone()


def _token(tokens: bytes, index: int) -> bytes:
    return tokens[WIDTH * index : WIDTH * (index + 1)]


def common_bytes(a: bytes, b: bytes) -> int:
    """Return the length of the longest common prefix.

    By halving: comparing two slices is one memcmp.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
