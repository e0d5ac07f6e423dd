"""Connect to the SQLite file of an index, and create it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection, Row

from vkv.store.local import reconcile
from vkv.store.local.index_errors import code, is_busy
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import POINTS
from vkv.store.local.removal import BUILD
from vkv.store.local.schema import QUARANTINED, TABLES, VERSION

#: KiB of the index to hold in memory at most: that of 50,000 entries.
PAGE_CACHE = 1 << 15
#: SQLite's codes where its notes beside the index cannot be made, or the folder not written.
_NOT_WRITABLE = {
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
}  # fmt: skip


class _Connection(Connection):
    """Close when it is garbage; Python 3.13 warns of a connection that is not closed."""

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.ProgrammingError):  # it was never opened
            self.close()


#: Connections that a fork inherited: SQLite says that a child may not even close them.
_inherited: list[Connection] = []


def connect(name: str) -> Connection:
    """Connect to a database by SQLite's URI, without waiting for locks."""
    db = sqlite3.connect(
        name, timeout=0, isolation_level=None, check_same_thread=False, uri=True,
        factory=_Connection,
    )  # fmt: skip
    db.row_factory = Row
    return db


def uri(path: Path, options: str) -> str:
    """Return SQLite's URI of a file, like ``file:///a/index?mode=ro``."""
    return f"{path.absolute().as_uri()}?{options}"


def begin_state(db: Connection, statement: str) -> bool:
    """Begin a transaction and fix the state that it sees; always true."""
    db.execute(statement)
    try:
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return True


class Opener:
    """Keep one connection to the index, and open it again when its file was replaced."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._db: Connection | None = None
        self._opened: tuple[int, ...] = ()
        self._at_path = False

    def connection(self, *, write: bool) -> Connection:
        """Return the connection; without ``write`` also one that can only be read."""
        if self._db is not None and self._opened == self._present():
            return self._db
        self.close()
        layout = self._layout
        if not write and not (layout.index.exists() or layout.objects.exists()):
            return self.in_memory()
        try:
            db = self._open()
        except (OSError, sqlite3.OperationalError) as exc:
            if write or is_busy(exc) or code(exc) not in {None, *_NOT_WRITABLE}:
                raise
            return self._read_only()
        self._db, self._opened, self._at_path = db, self._present(), True
        return db

    def is_current(self) -> bool:
        """Return whether the file of the connection is still the index."""
        return not self._at_path or self._opened == self._present()

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()
        self._db, self._opened, self._at_path = None, (), False

    def forget(self) -> None:
        """Leave the connection alone: it belongs to the parent process."""
        if self._db is not None:
            _inherited.append(self._db)
        self._db, self._opened, self._at_path = None, (), False

    def in_memory(self) -> Connection:
        """Return an index of its own, in memory."""
        db = connect(":memory:")
        create(db, self._layout)
        return db

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Let one process at a time open, create or replace the index.

        SQLite does not wait when the mode of the journal changes.
        """
        fd = os.open(self._layout.root, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _present(self) -> tuple[int, ...]:
        try:
            info = self._layout.index.stat()
        except OSError:
            return ()
        return info.st_dev, info.st_ino

    def _open(self) -> Connection:
        self._layout.make()
        with self.opening():
            fd = os.open(self._layout.index, os.O_RDWR | os.O_CREAT, 0o600)
            os.close(fd)
            db = connect(uri(self._layout.index, "mode=rw"))
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA cache_size = -{PAGE_CACHE}")
            create(db, self._layout)
            _retry_refused(db, self._layout)
        return db

    def _read_only(self) -> Connection:
        """Open in a folder where this process may not write.

        If nobody writes there, without SQLite's own notes beside the index.
        """
        if not self._layout.index.exists():
            return self.in_memory()
        db = connect(uri(self._layout.index, "mode=ro"))
        try:
            db.execute("SELECT n FROM entries LIMIT 1")
        except sqlite3.OperationalError as exc:
            if code(exc) not in _NOT_WRITABLE:
                raise
            db = connect(uri(self._layout.index, "mode=ro&immutable=1"))
        if _version(db) < VERSION:  # an older build wrote it; it has no checkpoints
            _execute(db, POINTS.replace("CREATE TABLE", "CREATE TEMP TABLE"))
        return db


def create(db: Connection, layout: Layout) -> None:
    """Make the tables of a new index, and list the files that are there.

    An index of an older build gets the tables that it lacks.
    """
    found = _version(db)
    if found >= VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if found == 0:
            _execute(db, TABLES)
            reconcile.list_files(db, layout)
        else:
            complete(db)
            reconcile.list_points(db, layout)
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _retry_refused(db: Connection, layout: Layout) -> None:
    """Try the entries again that another build has put aside, unless the index is busy."""
    query = "SELECT 1 FROM entries WHERE removed = ? AND reason NOT LIKE ? LIMIT 1"
    try:
        if db.execute(query, (QUARANTINED, f"{BUILD}%")).fetchone() is None:
            return
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:  # as the next statement says
        return
    try:
        reconcile.retry_refused(db, layout)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def complete(db: Connection) -> None:
    """Give an index of an older build the tables that it lacks, still empty."""
    if 0 < _version(db) < VERSION:
        _execute(db, f"{POINTS}; PRAGMA user_version = {VERSION}")


def _version(db: Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _execute(db: Connection, statements: str) -> None:
    """Execute statements inside the transaction there is; ``executescript`` would end it."""
    for statement in statements.split(";"):
        db.execute(statement)
