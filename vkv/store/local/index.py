"""Open the index of a store: SQLite, shared by many processes, rebuilt from the files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from sqlite3 import Connection, Error

from vkv.errors import StoreUnavailableError, VkvError
from vkv.store.local import entries, removal
from vkv.store.local.connection import Opener, begin_state, complete, connect
from vkv.store.local.forking import ForkSafeLock
from vkv.store.local.index_errors import PATIENCE, index_errors, is_busy
from vkv.store.local.layout import Layout

#: Seconds between two tries to get the lock of another process, at first and at most.
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05
#: Time of the last use, in seconds since 1970, and number of uses.
Use = tuple[float, int]


class Index:
    """Share one connection among the threads of this process, one transaction at a time.

    Nothing is created before something is written. A new index begins with the
    files that are there.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._opener = Opener(layout)
        self._guard = ForkSafeLock(self._begin_anew)
        self._uses = Uses()

    def __getstate__(self) -> Layout:
        return self.layout

    def __setstate__(self, layout: Layout) -> None:
        Index.__init__(self, layout)

    def _begin_anew(self) -> None:
        """Drop, in a child process, what belongs to its parent."""
        self._opener.forget()
        self._uses = Uses()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a view that does not change inside the block."""
        with index_errors(self.layout), self._transaction("BEGIN") as db:
            yield db

    @contextlib.contextmanager
    def write(self, *, dry: bool = False, patience: float | None = None) -> Iterator[Connection]:
        """Begin a transaction beside which no other process writes.

        Files of entries that it took out are removed after it, in one of their own.

        Args:
            dry: Undo all changes at the end.
            patience: Seconds to wait for another writer.

        Raises:
            StoreUnavailableError: Another process writes for longer than that.
        """
        noted = {} if dry else self._uses.take()
        try:
            with (
                index_errors(self.layout),
                self._transaction("BEGIN IMMEDIATE", dry=dry, patience=patience) as db,
            ):
                _store_uses(db, noted)
                yield db
                dead = not dry and entries.total_bytes(db, dead=True)
        except BaseException:
            self._uses.give_back(noted)
            raise
        if dead:
            with contextlib.suppress(StoreUnavailableError):  # then at the next write
                self._sweep(patience)

    def _sweep(self, patience: float | None) -> None:
        """Remove the files of dead entries, now that no reader of the index sees them."""
        with (
            index_errors(self.layout),
            self._transaction("BEGIN IMMEDIATE", dry=False, patience=patience) as db,
        ):
            removal.sweep(db, self.layout)

    @contextlib.contextmanager
    def _transaction(
        self, statement: str, *, dry: bool = True, patience: float | None = None
    ) -> Iterator[Connection]:
        """Begin, and commit at the end, or roll back if ``dry`` or an error is raised."""
        db = self._begin(statement, write=not dry, patience=patience)
        try:
            try:
                yield db
                if not dry:
                    db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        finally:
            self._guard.lock.release()

    def _begin(self, statement: str, *, write: bool, patience: float | None) -> Connection:
        """Take the lock of this object and begin a transaction.

        The lock is not held while waiting for another process, so that a reader in
        another thread, and a fork, need not wait for it too.
        """
        deadline = time.monotonic() + (PATIENCE if patience is None else patience)
        pause = FIRST_PAUSE
        while True:
            if self._guard.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                try:
                    db = self._opener.connection(write=write)
                    if begin_state(db, statement) and self._opener.is_current():
                        return db
                    db.execute("ROLLBACK")  # a new index took the place of this one
                except Error as exc:
                    if not is_busy(exc) or time.monotonic() >= deadline:
                        self._guard.lock.release()
                        raise
                except BaseException:
                    self._guard.lock.release()
                    raise
                self._guard.lock.release()
            elif time.monotonic() >= deadline:
                text = "another thread uses the index; try again later"
                raise StoreUnavailableError(text, at=str(self.layout.index))
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def note_use(self, key: str) -> None:
        """Note that an entry was used, without waiting for anyone.

        While another process writes, uses are kept here; the next write stores them.
        """
        self._uses.note(key)
        with contextlib.suppress(VkvError, OSError), self.write(patience=0):
            pass

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[Rehearsal]:
        """Copy the index to memory, to find out what a change would do."""
        with self.read() as db:
            copy = connect(":memory:")
            db.backup(copy)
            complete(copy)
        try:
            yield Rehearsal(self.layout, copy)
        finally:
            copy.close()

    @contextlib.contextmanager
    def locked_for_replacement(self) -> Iterator[None]:
        """Keep writers out, and let no process open the index, while it is replaced.

        Raises:
            StoreUnavailableError: The index is busy, or cannot be read now. A damaged one
                is no hindrance.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.write(dry=True))
            except VkvError as exc:
                if isinstance(exc, StoreUnavailableError):
                    raise
            stack.enter_context(self._opener.opening())
            yield

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._guard.lock:
            self._opener.close()


class Uses:
    """Keep the uses of entries that are not yet stored in the index."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[str, Use] = {}

    def note(self, key: str) -> None:
        """Count one more use, now."""
        with self._lock:
            self._noted[key] = (time.time(), self._noted.get(key, (0.0, 0))[1] + 1)

    def take(self) -> dict[str, Use]:
        """Return all uses, and forget them."""
        with self._lock:
            noted, self._noted = self._noted, {}
        return noted

    def give_back(self, noted: dict[str, Use]) -> None:
        """Keep uses that could not be stored."""
        with self._lock:
            for key, (when, count) in noted.items():
                later, more = self._noted.get(key, (0.0, 0))
                self._noted[key] = (max(when, later), count + more)


def _store_uses(db: Connection, noted: dict[str, Use]) -> None:
    query = "UPDATE entries SET used = ?, uses = uses + ? WHERE id = ?"
    db.executemany(query, [(when, count, key) for key, (when, count) in noted.items()])


class Rehearsal:
    """Stand for an index whose changes last only as long as this object."""

    def __init__(self, layout: Layout, db: Connection):
        self.layout, self._db = layout, db

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Give the copy."""
        with index_errors(self.layout):
            yield self._db

    write = read
