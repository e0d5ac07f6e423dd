"""Tell what SQLite reports of an index apart: damage of its file, or circumstances."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from vkv.errors import StoreUnavailableError, VkvError
from vkv.store.local.layout import Layout
from vkv.store.local.schema import HINT

#: Seconds to wait for another process that writes.
PATIENCE = 60.0
#: The longest path that SQLite opens, in bytes.
MAX_PATH = 511

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_NO_SPACE = {sqlite3.SQLITE_FULL}
_NOT_NOW = {
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_ABORT,
}  # fmt: skip


class DamagedIndexError(VkvError):
    """Report that the content of the index is not what this package wrote."""


def code(exc: BaseException) -> int | None:
    """Return SQLite's primary result code of an error, if it has one."""
    extended = getattr(exc, "sqlite_errorcode", None)
    return extended & 0xFF if isinstance(extended, int) else None


def is_busy(exc: BaseException) -> bool:
    """Return whether another connection holds a lock that the statement needs."""
    return code(exc) in _BUSY


def is_circumstance(exc: BaseException) -> bool:
    """Return whether an error says nothing about the content of the index."""
    return code(exc) in _BUSY | _NO_SPACE | _NOT_NOW


@contextlib.contextmanager
def index_errors(layout: Layout) -> Iterator[None]:
    """Turn SQLite's errors into vkv's.

    Raises:
        StoreUnavailableError: The index is busy, cannot be read or written at the moment,
            or there is no space: nothing is wrong with it.
        DamagedIndexError: Its content is not what this package wrote.
    """
    try:
        yield
    except sqlite3.Error as exc:
        if is_circumstance(exc):
            raise _unavailable(layout, exc) from exc
        raise DamagedIndexError(f"{exc}; {HINT}", at=str(layout.index)) from exc
    except (TypeError, ValueError, OverflowError, IndexError) as exc:  # of a column's value
        raise DamagedIndexError(f"{exc}; {HINT}", at=str(layout.index)) from exc


def _unavailable(layout: Layout, exc: sqlite3.Error) -> StoreUnavailableError:
    at, found = str(layout.index), code(exc)
    if found in _BUSY:
        text = f"another process has been writing to the index for {PATIENCE:g} s; try again later"
    elif found in _NO_SPACE:
        text = "no space is left on the disk for the index; `vkv store rm` or `gc` free some"
    elif found == sqlite3.SQLITE_CANTOPEN and len(at.encode()) > MAX_PATH:
        text = f"a path of {len(at.encode())} bytes, SQLite opens up to {MAX_PATH}"
    else:
        text = f"the index cannot be read or written at the moment ({exc}); it was left as it is"
    return StoreUnavailableError(text, at=at, no_space=found in _NO_SPACE)
