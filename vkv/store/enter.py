"""A finished file becomes an entry: room is made, it takes its place and is listed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

from vkv.atomic import replacing
from vkv.document import open_document
from vkv.elsewhere import Files, Place, beside
from vkv.errors import MissingFileError, VkvError
from vkv.inline import inline
from vkv.store import lookup, rows
from vkv.store.describe import describe, of
from vkv.store.entry import Entry
from vkv.store.evict import Limits, evict
from vkv.store.index import Index
from vkv.store.layout import Layout, sync
from vkv.store.tree import DamagedError

if TYPE_CHECKING:
    from vkv.live.save import CodecSpec


def take_in(index: Index, limits: Limits, written: Path) -> Entry:
    """Enter a file that was written on a desk of the store, or change nothing.

    The file takes its name inside the transaction that lists it, so no other process
    finds it between; should this one die there, the next ``gc`` lists it.

    Returns:
        The entry; if one with the same content was there, that one.

    Raises:
        MissingFileError: A file that it stands on has gone meanwhile.
        VkvError: It is of no use to a store, or does not fit into ``max_bytes``.
        OSError: ``min_free`` cannot be kept, or the store cannot be written.
    """
    what = describe(written)
    if limits.max_bytes is not None and what.size > limits.max_bytes:
        raise VkvError(f"an entry of {what.size:,} bytes, the limit is {limits.max_bytes:,}")
    with index.write() as db:
        if (same := rows.with_content(db, index.layout, what.content)) is not None:
            rows.touch(db, same)
            return rows.by_number(db, index.layout, same)
        if (gone := rows.missing(db, index.layout, what.bases)) is not None:
            raise MissingFileError(gone, [str(index.layout.objects)])
        number = rows.add(db, index.layout, what, time.time())
        _make_room(db, limits, index.layout.root, number)
        target = index.layout.accept(written, what.key)
        entry = rows.by_number(db, index.layout, number)
    sync(target.parent)  # outside: other writers need not wait for the disk
    return entry


def _make_room(db: Connection, limits: Limits, root: Path, number: int) -> None:
    over = evict(db, limits, root, keep=number)
    if over and limits.max_bytes is not None and rows.total(db) > limits.max_bytes:
        raise VkvError(
            f"no room: {over:,} bytes over the limit of {limits.max_bytes:,}, and what is left "
            "is pinned or stood on"
        )
    if over:
        reason = f"{over:,} bytes too few would stay free, and what is left is pinned or stood on"
        raise OSError(errno.ENOSPC, reason, str(root))


def ancestor(index: Index, owner: bytes, tokens: Any, codec: CodecSpec) -> Entry | None:
    """The entry that a new one may stand on, if there is one.

    Args:
        index: Of the store.
        owner: Id of the model.
        tokens: What the new one covers.
        codec: Of the new one.
    """
    from vkv.identity import token_bytes

    texts = [codec] if isinstance(codec, str) else codec.values()
    names = {text.partition(":")[0].strip() for text in texts} - {"raw"}
    with index.read() as db:
        try:
            found = lookup.ancestor(db, index.layout, owner, token_bytes(tokens), names)
        except DamagedError:  # whoever asks for it next takes it out
            return None
        return None if found is None else rows.by_number(db, index.layout, found["n"])


def bases(layout: Layout, entry: Entry) -> list[Path]:
    """The files that an entry stands on."""
    return [layout.path(key) for key in entry.files]


def bring(index: Index, path: Path, own: Path, files: Iterable[Place] | None) -> None:
    """Copy a file of any place to a desk of the store, checked to the last byte.

    What it stands on comes with it, inside it, unless the store has that.

    Raises:
        VkvError: The file is damaged, or stands on a file that is nowhere to be found.
    """
    with open_document(path) as source:
        needed = of(source).bases
        with index.read() as db:
            here = rows.missing(db, index.layout, needed) is None
        if here:
            copy(path, own)
        else:
            inline(source, own, beside(source) if files is None else Files(files))
    _check(own, os.fspath(path), [index.layout.path(key) for key in needed])


def give(layout: Layout, entry: Entry, path: Path) -> None:
    """Write an entry to a file that stands alone."""
    if not entry.files:
        copy(entry.path, path)
        return
    with open_document(entry.path) as source:
        inline(source, path, Files(bases(layout, entry)))


def copy(source: Path, target: Path) -> None:
    """Write a copy of a file, whole or not at all."""
    with source.open("rb") as old, replacing(target) as fd, open(fd, "wb", closefd=False) as new:
        shutil.copyfileobj(old, new, 1 << 20)


def _check(path: Path, name: str, files: list[Path]) -> None:
    """Refuse a file of which any byte changed; ``name`` is what the message calls it."""
    from vkv.validate import validate

    for finding in validate(path, files=files).findings:
        if finding.severity == "error":
            raise VkvError(finding.message, rule=finding.rule, at=finding.at).within(name)
