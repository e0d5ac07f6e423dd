"""Make one file of a file and its dependencies. Nothing is decoded or encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec import structs

from vkv._atomic import replacing
from vkv.format import container_write, file_id, header
from vkv.format.container_write import Pieces
from vkv.format.dependencies import Dependency, FileResolver, open_sound
from vkv.format.document import Document
from vkv.format.file_id import FileId
from vkv.format.framing import Form
from vkv.format.info import Info, of_document
from vkv.format.layers import external_references, segments
from vkv.format.schema import Header
from vkv.sources.base import Buffer
from vkv.sources.local import FileSource


def inline(
    source: Document,
    dst: str | os.PathLike[str],
    resolver: FileResolver,
    *,
    metadata: Mapping[str, str] | None = None,
    created: str | None = None,
    durable: bool = True,
) -> Info:
    """Write ``source`` with all that it refers to in other files.

    Args:
        source: The file.
        dst: Where to write.
        resolver: Finds the dependencies.
        metadata: Added to that of ``source``, and stronger.
        created: Instead of the time stamp of ``source``.
        durable: Flush to the disk before returning.

    Raises:
        MissingFileError: One was not found (H12).
        DigestError: Bytes changed (D1).
        OSError: ``dst`` cannot be written; what stood there is untouched.
    """
    head = source.header
    others = {key: open_sound(resolver, key, head) for key in external_references(head)}
    alone = header.replace(
        whole(head),
        metadata=head.metadata | header.metadata(metadata),
        created=created or head.created,
    )
    loads = [_load(source, others, name) for name in _order(head)]
    try:
        with replacing(dst, durable=durable) as fd:
            container_write.write(fd, loads, lambda _: header.dump(alone))
            with Document(FileSource(fd), os.fspath(dst)) as document:
                return of_document(document)
    finally:
        for other in others.values():
            other.document.close()


def whole(head: Header) -> Header:
    """Return the header of a file that holds all that ``head`` refers to in others."""
    return header.replace(
        head,
        version=header.VERSION,
        needs=tuple(need for need in head.needs if need != "files"),
        tensors={n: structs.replace(stored, file=None) for n, stored in head.tensors.items()},
    )


def _order(head: Header) -> list[str]:
    """List stored tensors: token ids, then layer by layer, so that a reader can stream."""
    first = [head.tokens.tensor] if head.tokens else []
    parts = [n for *_, segment in segments(head) for n in segment.parts.values()]
    return list(dict.fromkeys([*first, *parts, *head.tensors]))


def _load(
    source: Document, others: dict[FileId, Dependency], name: str
) -> tuple[Form, Callable[[], Buffer | Pieces]]:
    stored = source.header.tensors[name]
    form = (name, stored.dtype, stored.shape)
    if stored.file is None:
        return form, lambda: source.read(name)
    other = others[file_id.from_bytes(stored.file)]
    there = other.name(stored, name)
    return form, lambda: other.document.read(there)
