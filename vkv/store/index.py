"""The index of a store: SQLite, shared by many processes, made again from the files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.store import tree
from vkv.store.layout import Layout

#: ``removed``: 0 an entry; 1 taken out, but others stand on it; 2 its file may go.
LIVE, HELD, DEAD = range(3)
#: Seconds to wait for another process.
PATIENCE = 60.0

SCHEMA = (
    tree.SCHEMA
    + """
CREATE TABLE entries (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tree INTEGER NOT NULL, node INTEGER,
    size INTEGER NOT NULL, tokens INTEGER NOT NULL, tokens_at INTEGER NOT NULL,
    digest BLOB NOT NULL, label TEXT NOT NULL, codec TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX entries_by_node ON entries (node);
CREATE INDEX entries_by_use ON entries (removed, used);
CREATE TABLE stands (entry INTEGER NOT NULL, base INTEGER NOT NULL, PRIMARY KEY (entry, base))
    WITHOUT ROWID;
CREATE INDEX stands_by_base ON stands (base);
PRAGMA user_version = 1;
"""
)


class Index:
    """One connection of this process, one thread at a time.

    Args:
        layout: Of the store; nothing is created before something is written.
        fill: Called in the transaction that creates the index, to enter files that
            are there already.
    """

    def __init__(self, layout: Layout, fill: Callable[[Connection], object]):
        self._layout, self._fill = layout, fill
        self._lock = threading.RLock()
        self._db: Connection | None = None
        self._pid = 0

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A view that does not change inside the block."""
        with self._lock, _errors(self._layout):
            db = self._connection(write=False)
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self, *, dry: bool = False) -> Iterator[Connection]:
        """A transaction that no other process writes beside; with ``dry`` undone at its end."""
        with self._lock, _errors(self._layout):
            db = self._connection(write=not dry)
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("ROLLBACK" if dry else "COMMIT")

    def _connection(self, *, write: bool) -> Connection:
        if self._db is not None and self._pid == os.getpid():
            return self._db
        if not write and not self._layout.root.exists():
            return self._in_memory()
        try:
            self._db, self._pid = self._open(), os.getpid()
        except (OSError, sqlite3.OperationalError):
            if write:
                raise
            return self._read_only()
        return self._db

    def _open(self) -> Connection:
        self._layout.make()
        fd = os.open(self._layout.index, os.O_RDWR | os.O_CREAT, 0o600)
        os.close(fd)
        db = self._connect(self._layout.index.absolute().as_uri() + "?mode=rw")
        with self._creating():
            db.execute("PRAGMA journal_mode = WAL")
            self._create(db)
        return db

    def _read_only(self) -> Connection:
        """Of a directory where nothing can be written, not even SQLite's own notes."""
        if not self._layout.index.exists():
            return self._in_memory()
        return self._connect(self._layout.index.absolute().as_uri() + "?mode=ro&immutable=1")

    def _in_memory(self) -> Connection:
        db = self._connect(":memory:")
        self._create(db)
        return db

    def _connect(self, name: str) -> Connection:
        db = sqlite3.connect(
            name, timeout=PATIENCE, isolation_level=None, check_same_thread=False, uri=True
        )
        db.row_factory = Row
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """One process at a time: SQLite does not wait when the journal's mode changes."""
        fd = os.open(self._layout.root, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _create(self, db: Connection) -> None:
        if db.execute("PRAGMA user_version").fetchone()[0]:
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            self._fill(db)
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


@contextlib.contextmanager
def _errors(layout: Layout) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.DatabaseError as exc:
        raise VkvError(
            f"{exc}; `vkv store reindex` makes the index again from the files",
            at=str(layout.index),
        ) from exc
