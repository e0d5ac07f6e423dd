"""The index of a store: SQLite, shared by many processes, made again from the files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.store.local import entries as rows
from vkv.store.local import reconcile as files
from vkv.store.local.layout import Layout

#: Seconds to wait for another process.
PATIENCE = 60.0
#: KiB of the index to hold in memory at most: that of 50,000 entries.
CACHE = 1 << 15


class _Connection(Connection):
    """Closed when it is let go; Python 3.13 warns of one that is not."""

    def __del__(self) -> None:
        self.close()


#: What a fork inherited: SQLite says that a child may not even close it.
_inherited: list[Connection] = []


class Index:
    """One connection of this process, one thread at a time.

    Nothing is created before something is written. A new index begins with the
    files that are there.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._lock = threading.RLock()
        self._db: Connection | None = None
        self._opened: tuple[int, ...] = ()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A view that does not change inside the block."""
        with self._lock, _errors(self.layout):
            db = self._connection(write=False)
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self, *, dry: bool = False) -> Iterator[Connection]:
        """A transaction that no other process writes beside; with ``dry`` undone at its end.

        Files of entries that it took out are removed after it, in one of their own.
        """
        with self._lock, _errors(self.layout):
            db = self._connection(write=not dry)
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("ROLLBACK" if dry else "COMMIT")
            if not dry and rows.total(db, dead=True):
                self._sweep(db)

    def _sweep(self, db: Connection) -> None:
        """Remove the files of dead entries, now that no reader of the index sees them."""
        db.execute("BEGIN IMMEDIATE")
        try:
            rows.sweep(db, self.layout)
        finally:
            db.execute("COMMIT")

    def close(self) -> None:
        """Let go of the file; the next call opens it again."""
        with self._lock:
            if self._db is not None and self._opened[0] == os.getpid():
                self._db.close()
            self._db = None

    def reset(self) -> None:
        """Begin with an empty index, whatever is in its file."""
        with self._lock:
            self.close()
            for suffix in ("", "-wal", "-shm"):
                path = self.layout.index
                path.with_name(path.name + suffix).unlink(missing_ok=True)

    def _connection(self, *, write: bool) -> Connection:
        if self._db is not None and self._opened == self._present():
            return self._db
        if self._db is not None and self._opened[0] != os.getpid():
            _inherited.append(self._db)
        if not write and not (self.layout.index.exists() or self.layout.objects.exists()):
            return self._in_memory()
        try:
            self._db = self._open()
            self._opened = self._present()
        except (OSError, sqlite3.OperationalError):
            if write:
                raise
            return self._read_only()
        return self._db

    def _present(self) -> tuple[int, ...]:
        """This process and the file: a fork, or a store made anew, needs a new connection."""
        try:
            found = self.layout.index.stat()
        except OSError:
            return ()
        return os.getpid(), found.st_dev, found.st_ino

    def _open(self) -> Connection:
        self.layout.make()
        fd = os.open(self.layout.index, os.O_RDWR | os.O_CREAT, 0o600)
        os.close(fd)
        db = self._connect(self.layout.index.absolute().as_uri() + "?mode=rw")
        with self._creating():
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA cache_size = -{CACHE}")
            self._create(db)
        return db

    def _read_only(self) -> Connection:
        """Of a directory where we may not write; if nobody does, without SQLite's own notes."""
        if not self.layout.index.exists():
            return self._in_memory()
        name = self.layout.index.absolute().as_uri() + "?mode=ro"
        db = self._connect(name)
        try:
            db.execute("SELECT n FROM entries LIMIT 1")
        except sqlite3.OperationalError:
            return self._connect(f"{name}&immutable=1")
        return db

    def _in_memory(self) -> Connection:
        db = self._connect(":memory:")
        self._create(db)
        return db

    def _connect(self, name: str) -> Connection:
        db = sqlite3.connect(
            name, timeout=PATIENCE, isolation_level=None, check_same_thread=False, uri=True,
            factory=_Connection,
        )  # fmt: skip
        db.row_factory = Row
        return db

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """One process at a time: SQLite does not wait when the journal's mode changes."""
        fd = os.open(self.layout.root, os.O_RDONLY)
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
            for statement in rows.SCHEMA.split(";"):
                db.execute(statement)
            files.enter_files(db, self.layout)
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


@contextlib.contextmanager
def _errors(layout: Layout) -> Iterator[None]:
    """SQLite's errors as ours, and those of values that are not what a column holds."""
    try:
        yield
    except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError, IndexError) as exc:
        raise VkvError(f"{exc}; {rows.HINT}", at=str(layout.index)) from exc
