"""Open a ``.vkv`` file and check its container and header against each other.

Works without MLX and without the codecs, so that any valid file can be inspected and its
bytes verified, whatever codecs it uses.
"""

from __future__ import annotations

import os
from math import prod
from typing import Self

from blake3 import blake3

from vkv._paths import check_path
from vkv.errors import DigestError, HeaderError, VkvError
from vkv.format import container, container_write, header, limits
from vkv.format.container import Entry
from vkv.format.framing import HEADER
from vkv.format.layers import segment_shape, segments
from vkv.format.schema import Header
from vkv.sources import base
from vkv.sources.base import Source
from vkv.sources.local import FileSource
from vkv.sources.memory import BytesSource
from vkv.sources.opening import open_source
from vkv.sources.urls import is_url, shown


class Document:
    """Hold an open file: its entries, its header and its id.

    Args:
        source: Where the bytes come from; closed with the document.
        name: Name of the file in messages.
        address: The path or URL that it was opened by, with credentials; by default ``name``.

    Raises:
        ContainerError: The framing is broken, or the header is damaged (C1 to C8, C10).
        HeaderError: The header is broken (H1 to H11, H13).
        UnsupportedError: A newer file (H3, H4).
    """

    def __init__(self, source: Source, name: str = "<bytes>", address: str | None = None):
        self.source, self.name = source, name
        self.address = name if address is None else address
        try:
            found = container.parse(source)
            self.entries, self.id = found.entries, found.id
            self.header: Header = header.load(container.read_header(source, found))
            _check_version(self.header, found.version)
            _check_forms(self.header, self.entries)
            _check_expansion(self.header)
        except VkvError as exc:
            source.close()
            raise exc.of_file(name) from None

    @property
    def size(self) -> int:
        return self.source.size

    def read(self, name: str) -> bytes:
        """Return the bytes of one stored tensor, verified.

        Raises:
            DigestError: They are not what was written (D1).
        """
        entry = self.entries[name]
        data = self.source.read(entry.start, entry.nbytes)
        self.verify(name, data)
        return data

    def verify(self, name: str, data: base.Buffer) -> None:
        """Compare ``data`` with the digest of stored tensor ``name`` (D1)."""
        self.compare(name, container_write.digest(data))

    def compare(self, name: str, found: bytes) -> None:
        """Compare a digest with that of stored tensor ``name`` (D1)."""
        expected = self.header.tensors[name].digest
        if found != expected:
            raise DigestError(
                f"BLAKE3 {found.hex()[:16]}…, expected {expected.hex()[:16]}…: the bytes changed",
                rule="D1",
                at=name,
            )

    def check(self, name: str) -> None:
        """Compare the digest of one stored tensor without holding it (D1)."""
        entry = self.entries[name]
        state = blake3()
        for at in range(entry.start, entry.stop, base.READ_CHUNK):
            state.update(self.source.read(at, min(base.READ_CHUNK, entry.stop - at)))
        self.compare(name, state.digest())

    def check_all(self) -> None:
        """Compare the digest of every tensor of the container (D1)."""
        for name in self.entries:
            if name != HEADER:
                self.check(name)

    def tokens(self) -> list[int] | None:
        """Return the token ids, or ``None`` if the file has none."""
        if self.header.tokens is None:
            return None
        return memoryview(self.read(self.header.tokens.tensor)).cast("I").tolist()

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_document(target: str | os.PathLike[str] | bytes) -> Document:
    """Open a path, a URL (as text), or bytes in memory.

    Raises:
        VkvError: As ``Document``; ``target`` is no path; or a URL needs a package that is missing.
        OSError: It cannot be opened.
    """
    if isinstance(target, bytes):
        return Document(BytesSource(target))
    check_path(target)
    if isinstance(target, str) and is_url(target):
        return Document(open_source(target), shown(target), target)
    return Document(FileSource(target), os.fspath(target))


def _check_version(head: Header, version: str) -> None:
    """Check that header and ``__metadata__`` have the same version of the format (C8)."""
    if head.version != version:
        raise container.damaged(f"version {head.version!r}, __metadata__ says {version!r}")


def _check_forms(head: Header, entries: dict[str, Entry]) -> None:
    """Check that header and container name the same tensors, in the same forms (H6).

    Tensors of other files must not be in the container.
    """
    stored = {name: info for name, info in head.tensors.items() if info.file is None}
    for name in sorted(stored.keys() ^ (entries.keys() - {HEADER})):
        where = "the header" if name in stored else "the container"
        raise HeaderError(f"only {where} has it, expected both", rule="H6", at=name)
    for name, info in stored.items():
        entry = entries[name]
        if (info.dtype, info.shape) != (entry.dtype, entry.shape):
            raise HeaderError(
                f"{entry.dtype} {entry.shape} in the container, {info.dtype} {info.shape} in the "
                "header",
                rule="H6",
                at=name,
            )


def _check_expansion(head: Header) -> None:
    """Refuse segments of far more elements than their bytes can stand for (H10)."""
    free = limits.FREE_ELEMENTS
    for path, _, tensor, segment in segments(head):
        own = [head.tensors[name] for name in segment.parts.values()]
        held = sum(stored.nbytes for stored in own if stored.role != "table")
        asked = prod(segment_shape(tensor, segment))
        free -= max(0, asked - limits.MAX_EXPANSION * held)
        if free < 0:
            raise HeaderError(
                f"{asked} elements from {held} stored bytes, the limit is "
                f"{limits.MAX_EXPANSION} a byte",
                rule="H10",
                at=path,
            )
