"""Choose the entries that go when there is no room. Inside a transaction of the caller."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from sqlite3 import Connection

from vkv.store.local import entries, removal
from vkv.store.local.limits import Limits

_EVICTABLE = """
SELECT n FROM entries e WHERE removed IN (0, 3) AND pinned = 0 AND n != ?
AND NOT EXISTS (SELECT 1 FROM dependencies d WHERE d.dependency = e.id)
"""


def evict(db: Connection, limits: Limits, root: Path, keep: int = 0) -> int:
    """Take out what is over the limits: first what is in quarantine, then by last use.

    Neither pinned entries go, nor entry ``keep``, nor one that others depend on.

    Returns:
        Bytes that are still over.
    """
    _bound_times(db)
    if limits.max_age is not None:
        _expire(db, time.time() - limits.max_age, keep)
    over = _over(db, limits, root)
    while over > 0:
        query = f"{_EVICTABLE} ORDER BY removed = 0, used, n LIMIT 1"
        if (row := db.execute(query, (keep,)).fetchone()) is None:
            return over
        over -= removal.take_out(db, [row[0]])
    return 0


def _bound_times(db: Connection) -> None:
    """Set times of use that are in the future to now: the clock was ahead when they were noted."""
    now = time.time()
    db.execute("UPDATE entries SET used = ? WHERE used > ?", (now, now))


def _expire(db: Connection, before: float, keep: int) -> None:
    """Take out what nobody used since; dependents before what they depend on."""
    query = f"{_EVICTABLE} AND used < ? ORDER BY used"
    while expired := [n for (n,) in db.execute(query, (keep, before)).fetchall()]:
        removal.take_out(db, expired)


def _over(db: Connection, limits: Limits, root: Path) -> int:
    over = [0]
    if limits.max_bytes is not None:
        over.append(entries.total_bytes(db) - limits.max_bytes)
    if limits.min_free is not None:
        freed = entries.total_bytes(db, dead=True)
        over.append(limits.min_free - shutil.disk_usage(root).free - freed)
    return max(over)
