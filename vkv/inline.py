"""A file that stands on others as one that stands alone: nothing is decoded or encoded."""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import structs

from vkv import container, header
from vkv.atomic import replacing
from vkv.container import Buffer, FileSource, Form, Pieces
from vkv.document import Document
from vkv.elsewhere import Files, Other
from vkv.header import Header
from vkv.info import Info, of_document


def inline(
    source: Document, dst: str | os.PathLike[str], files: Files, *, durable: bool = True
) -> Info:
    """Write ``source`` with all that it refers to in other files.

    Raises:
        MissingFileError: One was not found (H12).
        DigestError: Bytes changed (D1).
        OSError: ``dst`` cannot be written; what stood there is untouched.
    """
    head = source.header
    others = {key: Other(files.open(key), head) for key in header.files(head)}
    alone = whole(head)
    loads = [_load(source, others, name) for name in _order(head)]
    try:
        with replacing(dst, durable=durable) as fd:
            container.write(fd, loads, lambda _: header.dump(alone))
            with Document(FileSource(fd), os.fspath(dst)) as document:
                return of_document(document)
    finally:
        for other in others.values():
            other.document.close()


def whole(head: Header) -> Header:
    """``head`` as that of a file which holds all that it refers to in others."""
    return header.replace(
        head,
        needs=tuple(need for need in head.needs if need != "files"),
        tensors={n: structs.replace(stored, file=None) for n, stored in head.tensors.items()},
    )


def _order(head: Header) -> list[str]:
    """Token ids, then layer by layer, so that a reader can stream."""
    first = [head.tokens.tensor] if head.tokens else []
    parts = [n for *_, segment in header.segments(head) for n in segment.parts.values()]
    return list(dict.fromkeys([*first, *parts, *head.tensors]))


def _load(
    source: Document, others: dict[bytes, Other], name: str
) -> tuple[Form, Callable[[], Buffer | Pieces]]:
    stored = source.header.tensors[name]
    form = (name, stored.dtype, stored.shape)
    if stored.file is None:
        return form, lambda: source.read(name)
    other = others[stored.file]
    there = other.name(stored, name)
    return form, lambda: other.document.read(there)
