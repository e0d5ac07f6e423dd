"""Turn a finished file into an entry: make room, give it its name, list it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

from vkv._atomic import replacing, sync_directory
from vkv.errors import MissingFileError, StoreUnavailableError, VkvError
from vkv.format.dependencies import Dependency, FileResolver
from vkv.format.document import Document, open_document
from vkv.format.file_id import FileId
from vkv.format.layers import external_references
from vkv.sources.base import READ_CHUNK
from vkv.store.local import entries, listing, lookup
from vkv.store.local.evict import evict
from vkv.store.local.file_check import damage
from vkv.store.local.index import Index
from vkv.store.local.layout import Layout
from vkv.store.local.limits import Limits
from vkv.store.local.prefix_tree import DamagedEntryError
from vkv.store.local.repair import discard, repair
from vkv.store.local.summary import Description, describe
from vkv.store.results import Entry
from vkv.tools.inline import inline

if TYPE_CHECKING:
    from vkv.caches.saving.request import CodecSpec

_log = logging.getLogger("vkv.store")


def save_and_ingest(
    index: Index,
    limits: Limits,
    write: partial[Any],
    parent: Entry | None,
    resolver: FileResolver,
) -> Entry:
    """Have a file written, if possible as one that depends on another entry, and ingest it.

    Args:
        index: Of the store.
        limits: Of the store.
        write: ``vkv.save``, but for the path, ``parent`` and ``search_paths``.
        parent: The entry to depend on.
        resolver: As ``ingest`` takes it.

    Raises as ``ingest``; ``StoreUnavailableError`` if the disk is full.
    """
    with room(index.layout, write.keywords["cache"]), index.layout.staging() as folder:
        path = folder / "new.vkv"
        if parent is not None and _written_on(index.layout, write, path, parent):
            with contextlib.suppress(MissingFileError):  # evicted meanwhile
                return ingest(index, limits, path, resolver)
        write(path)
        return ingest(index, limits, path, resolver)


@contextlib.contextmanager
def room(layout: Layout, what: Any) -> Iterator[None]:
    """Say on a full disk how much room a new entry needs, and what to do.

    Args:
        layout: Of the store.
        what: The path of a file, or caches.

    Raises:
        StoreUnavailableError: Its ``no_space`` is true; the store is as it was.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StoreUnavailableError(
            f"no space on the disk for a new entry of about {_size_of(what):,} bytes "
            f"({exc.strerror}); the store is as it was; `vkv store rm` or `gc` make room",
            at=str(layout.root), no_space=True,
        ) from exc  # fmt: skip


def _size_of(what: Any) -> int:
    if isinstance(what, str | os.PathLike):
        return os.stat(what).st_size
    return sum(int(getattr(layer, "nbytes", 0)) for layer in getattr(what, "cache", what))


def _written_on(layout: Layout, write: Callable[..., object], path: Path, parent: Entry) -> bool:
    """Write a file that depends on ``parent``; return whether that could be done."""
    try:
        write(path, parent=parent.path, search_paths=dependency_paths(layout, parent))
    except (VkvError, OSError) as exc:  # it is damaged or gone; or the next try says it too
        _log.info("no file can depend on %s: %s", parent.id, exc)
        return False
    return True


def ingest(
    index: Index, limits: Limits, written: Path, resolver: FileResolver | None = None
) -> Entry:
    """Make an entry of a file in a staging folder of the store, or change nothing.

    The file takes its name inside the transaction that lists it, so no other process
    finds it between; should this one die there, the next ``gc`` lists it.

    Args:
        index: Of the store.
        limits: Of the store.
        written: The file.
        resolver: Locates the dependencies that the store lacks; they are ingested too.

    Returns:
        The entry; if one with the same content was there, that one.

    Raises:
        MissingFileError: A dependency was not found.
        VkvError: It is of no use to a store, or does not fit into ``max_bytes``.
        StoreUnavailableError: ``min_free`` cannot be kept, or the index is busy.
        OSError: The store cannot be written.
    """
    with open_document(written) as document:
        what = describe(document)
    if limits.max_bytes is not None and what.size > limits.max_bytes:
        raise VkvError(f"an entry of {what.size:,} bytes, the limit is {limits.max_bytes:,}")
    same = _sound_same(index, what)
    brought = _copy_dependencies(index, what, written.parent, resolver or FileResolver())
    _check_references(index.layout, written, brought)
    unplaced: list[str] = []
    with index.write() as db:
        if same is not None and (entry := _touched(db, index.layout, what, same)) is not None:
            return entry
        number = _list(db, index.layout, what, brought, unplaced)
        _make_room(db, limits, index.layout.root, number)
        for key, path in {**brought, what.key: written}.items():
            index.layout.accept(path, key)
        entry = entries.by_number(db, index.layout, number)
    for key in unplaced:
        repair(index, key, VkvError("its tokens cannot be read"))
    for key in (*brought, what.key):
        sync_directory(index.layout.path(key).parent)  # outside: other writers need not wait
    return entry


def _sound_same(index: Index, what: Description) -> str | None:
    """Return the id of the entry with the same content, if every byte of it is sound.

    One that is damaged is taken out, so that the new file takes its place.
    """
    while True:
        with index.read() as db:
            same = entries.with_content(db, index.layout, what.content)
        if same is None:
            return None
        files = {key: damage(index.layout.path(key)) for key in (same.id, *same.dependencies)}
        broken = {key: file for key, file in files.items() if file.problem is not None}
        if not broken:
            return same.id
        if not all(discard(index, file, key) for key, file in broken.items()):
            return None


def _touched(db: Connection, layout: Layout, what: Description, key: str) -> Entry | None:
    """Note that an entry with the same content was put again, if it is still there."""
    same = entries.with_content(db, layout, what.content)
    if same is None or same.id != key:
        return None
    query = "UPDATE entries SET used = ?, uses = uses + 1 WHERE id = ?"
    db.execute(query, (time.time(), key))
    return same


def _list(
    db: Connection,
    layout: Layout,
    what: Description,
    brought: dict[str, Path],
    unplaced: list[str],
) -> int:
    for key in entries.missing(db, layout, what.dependencies):
        if key not in brought:
            raise MissingFileError(key, [str(layout.objects)])
        listing.retain(db, key, brought[key].stat().st_size)
    return listing.add(db, layout, what, time.time(), unplaced)


def _copy_dependencies(
    index: Index, what: Description, folder: Path, resolver: FileResolver
) -> dict[str, Path]:
    """Return checked copies, by id, of those dependencies that the store lacks."""
    with index.read() as db:
        lacking = entries.missing(db, index.layout, what.dependencies)
    copies = {key: folder / f"{key}.vkv" for key in lacking}
    for key, path in copies.items():
        with resolver.open(FileId(key), Document.check_all) as document:
            _copy(document, path)
    return copies


def _check_references(layout: Layout, written: Path, brought: dict[str, Path]) -> None:
    """Check that every tensor that a file refers to exists (H12).

    Else it would be found in place of a later file that has the same content and holds it.
    """
    with open_document(written) as document:
        head = document.header
        for key, names in external_references(head).items():
            try:
                with open_document(brought.get(key, layout.path(key))) as other:
                    dependency = Dependency(other, head)
                    for name in names:
                        dependency.name(head.tensors[name], name)
            except FileNotFoundError:
                raise MissingFileError(key, [str(layout.objects)]) from None


def _make_room(db: Connection, limits: Limits, root: Path, number: int) -> None:
    over = evict(db, limits, root, keep=number)
    if over and limits.max_bytes is not None and entries.total_bytes(db) > limits.max_bytes:
        raise VkvError(
            f"no room: {over:,} bytes over the limit of {limits.max_bytes:,}, and the rest "
            "is pinned or others depend on it"
        )
    if over:
        raise StoreUnavailableError(
            f"{over:,} bytes too few would stay free (min_free), and the rest is pinned or needed",
            at=str(root), no_space=True,
        )  # fmt: skip


def parent_for(index: Index, owner: bytes, tokens: Any, codec: CodecSpec) -> Entry | None:
    """Return the entry that a new one may depend on, if there is one.

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
            row = lookup.parent_for(db, index.layout, owner, token_bytes(tokens), names)
        except (DamagedEntryError, OSError):  # whoever asks for it next takes it out
            return None
        return None if row is None else entries.by_number(db, index.layout, row["n"])


def dependency_paths(layout: Layout, entry: Entry) -> list[Path]:
    """Return the files that an entry depends on."""
    return [layout.path(key) for key in entry.dependencies]


def copy_checked(path: Path, target: Path, resolver: FileResolver) -> None:
    """Copy a file of any place to a staging folder, checked to the last byte.

    Raises:
        VkvError: It is damaged, or of no use to a store.
    """
    from vkv.tools.validate import validate

    with open_document(path) as document:
        describe(document)
        _copy(document, target)
    for finding in validate(target, search_paths=resolver.search_paths).findings:
        if finding.severity == "error" and finding.rule != "H12":
            raise VkvError(finding.message, rule=finding.rule, at=finding.at).of_file(str(path))


def export(layout: Layout, entry: Entry, path: Path) -> None:
    """Write an entry to a file that depends on no other."""
    with open_document(entry.path) as document:
        if entry.dependencies:
            inline(document, path, FileResolver(dependency_paths(layout, entry)))
        else:
            _copy(document, path)


def _copy(source: Document, path: Path) -> None:
    """Copy a file, whole or not at all."""
    bytes_of = source.source
    with replacing(path) as fd, open(fd, "wb", closefd=False) as out:
        for at in range(0, bytes_of.size, READ_CHUNK):
            out.write(bytes_of.read(at, min(READ_CHUNK, bytes_of.size - at)))
