"""A finished file becomes an entry: room is made, it takes its place and is listed."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from sqlite3 import Connection

from vkv.atomic import replacing
from vkv.errors import VkvError
from vkv.store import rows
from vkv.store.describe import describe
from vkv.store.entry import Entry
from vkv.store.evict import Limits, evict
from vkv.store.index import Index


def take_in(index: Index, limits: Limits, written: Path) -> Entry:
    """Enter a file that was written on a desk of the store, or change nothing.

    The file takes its name inside the transaction that lists it, so no other process
    finds it between; should this one die there, the next ``gc`` lists it.

    Raises:
        VkvError: It is of no use to a store, or does not fit into ``max_bytes``.
        OSError: ``min_free`` cannot be kept, or the store cannot be written.
    """
    what = describe(written)
    if limits.max_bytes is not None and what.size > limits.max_bytes:
        raise VkvError(f"an entry of {what.size:,} bytes, the limit is {limits.max_bytes:,}")
    with index.write() as db:
        number = rows.add(db, index.layout, what, time.time())
        _make_room(db, limits, index.layout.root, number)
        index.layout.accept(written, what.key)
        return rows.by_number(db, index.layout, number)


def _make_room(db: Connection, limits: Limits, root: Path, number: int) -> None:
    over = evict(db, limits, root, keep=number)
    if over and limits.max_bytes is not None and rows.total(db) > limits.max_bytes:
        raise VkvError(
            f"no room: {over:,} bytes over the limit of {limits.max_bytes:,}, and what is left "
            "is pinned"
        )
    if over:
        reason = f"{over:,} bytes too few would stay free, and what is left is pinned"
        raise OSError(errno.ENOSPC, reason, str(root))


def copy(source: Path, target: Path) -> None:
    """Write a copy of a file, whole or not at all.

    Raises:
        OSError: It cannot be read, or ``target`` cannot be written.
    """
    with source.open("rb") as old, replacing(target) as fd, open(fd, "wb", closefd=False) as new:
        shutil.copyfileobj(old, new, 1 << 20)


def check(path: Path, name: str) -> None:
    """Refuse a file of which any byte changed.

    Args:
        path: The file.
        name: What the message calls it.

    Raises:
        VkvError: The first finding.
    """
    from vkv.validate import validate

    for finding in validate(path).findings:
        if finding.severity == "error":
            raise VkvError(finding.message, rule=finding.rule, at=finding.at).within(name)
