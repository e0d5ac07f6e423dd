"""Define the tables of a store's index, and the states of an entry."""

from __future__ import annotations

from vkv.store.local import prefix_tree

#: Column ``removed``. LIVE: searched and listed. RETAINED: removed, but others depend on its
#: file. DEAD: its file may go. QUARANTINED: sound, but it cannot be loaded; never an answer.
LIVE, RETAINED, DEAD, QUARANTINED = range(4)

#: Tree number of files that are no entries: only others depend on them.
NO_TREE = 0

#: Version of the tables; 2 added ``points``.
VERSION = 2

TABLES = (
    prefix_tree.TABLES
    + prefix_tree.POINTS
    + f"""
CREATE TABLE entries (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content BLOB NOT NULL,
    tree INTEGER NOT NULL, node INTEGER,
    size INTEGER NOT NULL, tokens INTEGER NOT NULL, tokens_at INTEGER NOT NULL,
    digest BLOB NOT NULL, label TEXT NOT NULL, codec TEXT NOT NULL,
    name TEXT NOT NULL DEFAULT '', tags TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '');
CREATE INDEX entries_by_node ON entries (node);
CREATE INDEX entries_by_use ON entries (removed, used, size);
CREATE INDEX entries_by_content ON entries (content);
CREATE TABLE dependencies (
    entry INTEGER NOT NULL, dependency TEXT NOT NULL, PRIMARY KEY (entry, dependency))
    WITHOUT ROWID;
CREATE INDEX dependencies_by_id ON dependencies (dependency);
PRAGMA user_version = {VERSION};
"""
)

#: Advice for an index whose content is not what this package wrote.
HINT = "`vkv store reindex` builds a new index from the files"
