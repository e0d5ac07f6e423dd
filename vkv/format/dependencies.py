"""Locate the files that a .vkv file depends on, by content id, in files and folders (H12).

A file's name says nothing about its id. So a file named by the id is tried first; then the
ids of all candidates are learnt, each once, from their headers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vkv.errors import HeaderError, MissingFileError, VkvError
from vkv.format import container, container_write
from vkv.format.document import Document, open_document
from vkv.format.limits import MAX_HEADER, MAX_JSON
from vkv.format.schema import Header, Stored
from vkv.sources.local import FileSource
from vkv.sources.opening import open_source
from vkv.sources.urls import is_url

#: A file, or a folder whose ``.vkv`` files are candidates. Of a folder behind a URL, which may
#: have no listing, only files named by the id are.
SearchPath = str | os.PathLike[str]
#: Candidates whose ids one search learns, and bytes of JSON and headers that it reads for them.
MAX_CANDIDATES, MAX_CANDIDATE_BYTES = 4096, 64 << 20


class FileResolver:
    """Locate vkv files by id. Folders are listed once, when first needed.

    Args:
        search_paths: Files and folders, searched in this order.
    """

    def __init__(self, search_paths: Iterable[SearchPath] = ()):
        self.search_paths = [
            x if isinstance(x, str) and is_url(x) else Path(x) for x in search_paths
        ]
        self._known: dict[str, list[Path | str]] = {}
        self._unread = self._learn()
        self._ended = ""

    def open(self, file_id: bytes) -> Document:
        """Open the file whose id is ``file_id``.

        Raises:
            MissingFileError: No search path has it, or too many candidates would have to be
                read (H12); the message names the id.
        """
        name = file_id.hex()
        for path in self._candidates(name):
            try:
                document = open_document(path)
            except (VkvError, OSError):
                continue
            if document.id == name:
                return document
            document.close()
        raise MissingFileError(name, [str(path) for path in self.search_paths], ended=self._ended)

    def _candidates(self, name: str) -> Iterator[Path | str]:
        """Yield files named by the id in any search path, then files with that id."""
        for path in self.search_paths:
            if isinstance(path, str):
                named = path.rpartition("/")[2] == f"{name}.vkv"
                yield from [path] if named else [] if _is_file(path) else _in_folder(path, name)
            elif path.stem == name:
                yield path
            elif path.is_dir():
                yield path / f"{name}.vkv"
        yield from tuple(self._known.get(name, ()))
        for learnt, path in self._unread:
            if learnt == name:
                yield path

    def _learn(self) -> Iterator[tuple[str, Path | str]]:
        """Yield the id of each candidate; all searches of this resolver share one pass."""
        candidates = nbytes = 0
        for path in self._listed():
            if candidates == MAX_CANDIDATES or nbytes >= MAX_CANDIDATE_BYTES:
                self._ended = f"after {candidates:,} files and {nbytes:,} bytes of headers"
                return
            learnt, read = _id_of(path)
            candidates, nbytes = candidates + 1, nbytes + read
            if learnt is not None:
                self._known.setdefault(learnt, []).append(path)
                yield learnt, path

    def _listed(self) -> Iterator[Path | str]:
        for path in self.search_paths:
            if isinstance(path, str):
                yield from [path] if _is_file(path) else []
            elif path.is_dir():
                yield from sorted(path.glob("*.vkv"))
            else:
                yield path


def _id_of(path: Path | str) -> tuple[str | None, int]:
    """Return the id of a file without decoding its header, and the bytes read.

    The id is ``None`` if the file cannot be read or is no vkv file.
    """
    nbytes = 0
    try:
        source = open_source(path) if isinstance(path, str) else FileSource(path)
        try:
            nbytes = min(int.from_bytes(source.read(0, 8), "little"), MAX_JSON)
            entry = container.parse(source)[container.HEADER]
            if entry.nbytes > MAX_HEADER:
                return None, nbytes
            nbytes += entry.nbytes
            return container_write.digest(source.read(entry.start, entry.nbytes)).hex(), nbytes
        finally:
            source.close()
    except (VkvError, OSError):
        return None, nbytes


def _is_file(url: str) -> bool:
    return url.endswith(".vkv")


def _in_folder(url: str, name: str) -> list[str]:
    """Return where a folder without listing may have the file, named as by hand or in a store."""
    folder = url.rstrip("/")
    return [f"{folder}/{name}.vkv", f"{folder}/{name[:2]}/{name}.vkv"]


def default_resolver(document: Document) -> FileResolver:
    """Return the resolver used when no search path is given: the folder of ``document``.

    For an object of a remote store the folder above is searched too.
    """
    if is_url(document.name):
        folder = document.name.rpartition("/")[0]
        above, _, last = folder.rpartition("/")
        return FileResolver([folder, above] if last == document.id[:2] else [folder])
    path = Path(document.name)
    return FileResolver([path.parent] if path.is_file() else ())


def resolver_for(
    document: Document, search_paths: Iterable[SearchPath] | None, more: Iterable[SearchPath] = ()
) -> FileResolver:
    """Return a resolver over ``search_paths`` (default: ``default_resolver``) and ``more``."""
    if isinstance(search_paths, str | os.PathLike):
        search_paths = [search_paths]
    if search_paths is not None and not isinstance(search_paths, Iterable):
        found = type(search_paths).__name__
        raise VkvError(f"search_paths is a {found}, expected files and folders")
    first = default_resolver(document).search_paths if search_paths is None else search_paths
    return FileResolver([*first, *more])


class Dependency:
    """Find stored tensors in one file that another depends on.

    Args:
        document: The file depended on; closed if it is refused.
        head: Header of the file that depends on it.

    Raises:
        HeaderError: ``head`` refers to more bytes than the file has (H12).
    """

    def __init__(self, document: Document, head: Header):
        self.document = document
        file_id, size = bytes.fromhex(document.id), document.size
        used = sum(stored.nbytes for stored in head.tensors.values() if stored.file == file_id)
        if used > size:
            document.close()
            raise HeaderError(
                f"{used} bytes are used of file {document.id[:16]}…, which has {size}",
                rule="H12",
                at="tensors",
            )
        self._names = {
            _content(stored): name
            for name, stored in document.header.tensors.items()
            if stored.file is None
        }

    def name(self, stored: Stored, at: str) -> str:
        """Return the name in this file of the tensor that ``stored`` refers to.

        Raises:
            HeaderError: The file has no such tensor (H12).
        """
        name = self._names.get(_content(stored))
        if name is None:
            raise HeaderError(
                f"file {self.document.id[:16]}… holds no {stored.dtype} {stored.shape} of digest "
                f"{stored.digest.hex()[:16]}…",
                rule="H12",
                at=at,
            )
        return name


def _content(stored: Stored) -> tuple[bytes, str, tuple[int, ...]]:
    return stored.digest, stored.dtype, stored.shape
