"""Deal with an entry that turned out wrong: enter it anew, take it out, or put it aside.

A file is read without the lock of the index; under the lock it is only made sure that it is
still the file that was read, as another process may have replaced it.
"""

from __future__ import annotations

import logging
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.store.local import listing, removal
from vkv.store.local.file_check import Examined, examine_key, stamp
from vkv.store.local.index import Index
from vkv.store.local.schema import DEAD

_log = logging.getLogger("vkv.store")


def repair(index: Index, key: str, reason: Exception, *, patience: float | None = None) -> bool:
    """List a sound file anew of which the index said something wrong; else take it out.

    Args:
        index: Of the store.
        key: Id of the entry.
        reason: What seemed wrong with it.
        patience: Seconds to wait for another process that writes.

    Returns:
        Whether that could be done, so that a new search gives another answer.
    """
    left = [key]
    try:
        while left:
            file = examine_key(index.layout, left[0])
            with index.write(patience=patience) as db:
                left += _repair(db, index, left.pop(0), file, reason)
    except (VkvError, OSError) as exc:  # a store that is busy, or can only be read
        _log.info("%s cannot be mended now: %s", key, exc)
        return False
    return True


def _repair(db: Connection, index: Index, key: str, file: Examined, reason: Exception) -> list[str]:
    row = _row(db, key)
    if row is None or (file.stamp is not None and not file.unchanged):
        return []
    if file.problem is not None and file.breaks_rule:
        removal.refuse(db, row, file.problem)
        return []
    if file.description is None:
        removal.drop(db, row, reason if file.problem is None else file.problem)
        return []
    _log.warning("%s is sound; the index spoke wrongly of it and was corrected", key)
    return listing.relist(db, index.layout, row, file.description)


def discard(index: Index, file: Examined, key: str, *, patience: float | None = None) -> bool:
    """Take out an entry whose file is damaged or gone; put it aside if it breaks a rule.

    Args:
        index: Of the store.
        file: The damaged file, as it was read.
        key: Its id.
        patience: Seconds to wait for another process that writes.

    Returns:
        Whether that could be done; also if the file was replaced meanwhile.
    """
    assert file.problem is not None
    try:
        with index.write(patience=patience) as db:
            row = _row(db, key)
            if row is not None and stamp(file.path) == file.stamp:
                act = removal.refuse if file.breaks_rule else removal.drop
                act(db, row, file.problem)
    except (VkvError, OSError):  # a store that is busy, or can only be read
        return False
    return True


def put_aside(
    index: Index, file: Examined, key: str, reason: Exception, *, patience: float | None = None
) -> bool:
    """Put an entry into quarantine whose bytes are sound but which cannot be loaded.

    Arguments and result are those of ``discard``.
    """
    try:
        with index.write(patience=patience) as db:
            row = _row(db, key)
            if row is not None and file.unchanged:
                removal.quarantine(db, row, str(reason))
    except (VkvError, OSError):
        return False
    return True


def _row(db: Connection, key: str) -> Row | None:
    query = "SELECT * FROM entries WHERE id = ? AND removed != ?"
    row: Row | None = db.execute(query, (key, DEAD)).fetchone()
    return row
