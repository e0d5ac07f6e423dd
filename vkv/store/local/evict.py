"""Which entries go when there is no room. Inside a transaction of the caller's."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from vkv.store.local import entries as rows


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store may take up; ``None`` for no limit.

    Attributes:
        max_bytes: Of all files together.
        max_age: Seconds that an entry may go unused.
        min_free: Bytes that shall stay free on the disk.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    min_free: int | None = None


def evict(db: Connection, limits: Limits, root: Path, keep: int = 0) -> int:
    """Take out what is over the limits, least recently used first.

    Neither pinned entries go, nor entry ``keep``, nor one that others stand on.

    Returns:
        Bytes that are still over.
    """
    if limits.max_age is not None:
        _expire(db, time.time() - limits.max_age, keep)
    over = _over(db, limits, root)
    while over > 0:
        found = db.execute(f"{_EVICTABLE} ORDER BY used, n LIMIT 1", (keep,)).fetchone()
        if found is None:
            return over
        over -= rows.take_out(db, [found[0]])
    return 0


_EVICTABLE = """
SELECT n FROM entries e WHERE removed = 0 AND pinned = 0 AND n != ?
AND NOT EXISTS (SELECT 1 FROM stands s WHERE s.base = e.id)
"""


def _expire(db: Connection, before: float, keep: int) -> None:
    """Take out what nobody used since; what stands on others before what it stands on."""
    query = f"{_EVICTABLE} AND used < ? ORDER BY used"
    while found := [n for (n,) in db.execute(query, (keep, before)).fetchall()]:
        rows.take_out(db, found)


def _over(db: Connection, limits: Limits, root: Path) -> int:
    over = [0]
    if limits.max_bytes is not None:
        over.append(rows.total(db) - limits.max_bytes)
    if limits.min_free is not None:
        freed = rows.total(db, dead=True)
        over.append(limits.min_free - shutil.disk_usage(root).free - freed)
    return max(over)
