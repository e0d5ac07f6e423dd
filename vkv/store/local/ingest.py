"""A finished file becomes an entry: room is made, it takes its place and is listed."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

from vkv._atomic import replacing, sync_directory
from vkv.errors import MissingFileError, VkvError
from vkv.format.dependencies import Dependency, FileResolver
from vkv.format.document import Document, open_document
from vkv.format.file_id import FileId
from vkv.format.layers import external_references
from vkv.sources.base import READ_CHUNK
from vkv.store.local import entries as rows
from vkv.store.local import lookup
from vkv.store.local.evict import Limits, evict
from vkv.store.local.index import Index
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import DamagedError
from vkv.store.local.summary import describe, of
from vkv.store.results import Entry
from vkv.tools.inline import inline

if TYPE_CHECKING:
    from vkv.caches.saving.request import CodecSpec

_log = logging.getLogger("vkv.store")


def put_in(
    index: Index,
    limits: Limits,
    write: Callable[..., None],
    parent: Entry | None,
    resolver: FileResolver,
) -> Entry:
    """Have a file written on a desk, standing on another entry if that can be, and enter it.

    Args:
        index: Of the store.
        limits: Of the store.
        write: ``vkv.save``, but for the path, ``parent`` and ``search_paths``.
        parent: What to stand on.
        resolver: As ``take_in`` takes it. Raises as it does.
    """
    with index.layout.desk() as desk:
        path = desk / "new.vkv"
        if parent is not None and _stands(index.layout, write, path, parent):
            with contextlib.suppress(MissingFileError):  # evicted meanwhile
                return take_in(index, limits, path, resolver)
        write(path)
        return take_in(index, limits, path, resolver)


def _stands(layout: Layout, write: Callable[..., None], path: Path, parent: Entry) -> bool:
    """Write a file that stands on ``parent``; whether it could be done."""
    try:
        write(path, parent=parent.path, search_paths=bases(layout, parent))
    except (VkvError, OSError) as exc:  # it is damaged or gone; or the next try says it too
        _log.info("nothing can stand on %s: %s", parent.id, exc)
        return False
    return True


def take_in(
    index: Index, limits: Limits, written: Path, resolver: FileResolver | None = None
) -> Entry:
    """Enter a file that was written on a desk of the store, or change nothing.

    The file takes its name inside the transaction that lists it, so no other process
    finds it between; should this one die there, the next ``gc`` lists it.

    Args:
        index: Of the store.
        limits: Of the store.
        written: The file.
        resolver: Where the files are found that it stands on and the store lacks; they
            are taken in too.

    Returns:
        The entry; if one with the same content was there, that one.

    Raises:
        MissingFileError: A file that it stands on is not to be found.
        VkvError: It is of no use to a store, or does not fit into ``max_bytes``.
        OSError: ``min_free`` cannot be kept, or the store cannot be written.
    """
    what, layout = describe(written), index.layout
    if limits.max_bytes is not None and what.size > limits.max_bytes:
        raise VkvError(f"an entry of {what.size:,} bytes, the limit is {limits.max_bytes:,}")
    brought = _bring_bases(index, what.bases, written.parent, resolver or FileResolver())
    _check_bases(layout, written, brought)
    with index.write() as db:
        if (same := rows.with_content(db, layout, what.content)) is not None:
            rows.touch(db, same.id)
            return same
        for key in rows.missing(db, layout, what.bases):
            if key not in brought:
                raise MissingFileError(key, [str(layout.objects)])
            rows.hold(db, key, brought[key].stat().st_size)
        number = rows.add(db, layout, what, time.time())
        _make_room(db, limits, layout.root, number)
        for key, path in {**brought, what.key: written}.items():
            layout.accept(path, key)
        entry = rows.by_number(db, layout, number)
    for key in (*brought, what.key):
        sync_directory(layout.path(key).parent)  # outside: other writers need not wait for the disk
    return entry


def _bring_bases(
    index: Index, bases: Iterable[str], desk: Path, resolver: FileResolver
) -> dict[str, Path]:
    """Checked copies, by id, of those files to stand on that the store lacks."""
    with index.read() as db:
        lacking = rows.missing(db, index.layout, bases)
    copies = {key: desk / f"{key}.vkv" for key in lacking}
    for key, path in copies.items():
        with resolver.open(FileId(key)) as document:
            document.check_all()
            _write(document, path)
    return copies


def _check_bases(layout: Layout, written: Path, brought: dict[str, Path]) -> None:
    """Every tensor that a file refers to is there (H12).

    Else it would be found in place of a later one that has the same content and holds it.
    """
    with open_document(written) as document:
        head = document.header
        for key, names in external_references(head).items():
            try:
                with open_document(brought.get(key, layout.path(key))) as base:
                    other = Dependency(base, head)
                    for name in names:
                        other.name(head.tensors[name], name)
            except FileNotFoundError:
                raise MissingFileError(key, [str(layout.objects)]) from None


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


def copy_in(path: Path, own: Path, resolver: FileResolver) -> None:
    """Copy a file of any place to a desk of the store, checked to the last byte.

    Raises:
        VkvError: It is damaged, or of no use to a store.
    """
    from vkv.tools.validate import validate

    with open_document(path) as document:
        of(document)
        _write(document, own)
    for finding in validate(own, search_paths=resolver.search_paths).findings:
        if finding.severity == "error" and finding.rule != "H12":
            raise VkvError(finding.message, rule=finding.rule, at=finding.at).within(str(path))


def give(layout: Layout, entry: Entry, path: Path) -> None:
    """Write an entry to a file that stands alone."""
    with open_document(entry.path) as document:
        if entry.files:
            inline(document, path, FileResolver(bases(layout, entry)))
        else:
            _write(document, path)


def _write(document: Document, path: Path) -> None:
    """A copy of a file, whole or not at all."""
    source = document.source
    with replacing(path) as fd, open(fd, "wb", closefd=False) as out:
        for at in range(0, source.size, READ_CHUNK):
            out.write(source.read(at, min(READ_CHUNK, source.size - at)))
