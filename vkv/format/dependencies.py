"""Locate the files that a .vkv file depends on, by content id, in files and folders (H12).

A file's name says nothing about its id. So a file named by the id is tried first; then the
ids of all candidates are learnt, each once, from their first bytes. What they say is checked
against their headers before anything is parsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from vkv.errors import HeaderError, MissingFileError, VkvError
from vkv.format import container
from vkv.format.document import Document, open_document
from vkv.format.file_id import FileId
from vkv.format.layers import external_references
from vkv.format.schema import Header, Stored
from vkv.sources import urls
from vkv.sources.base import Source
from vkv.sources.local import FileSource
from vkv.sources.opening import open_source
from vkv.sources.urls import is_url

#: A file, or a folder whose ``.vkv`` files are candidates. Of a folder behind a URL, which may
#: have no listing, only files named by the id are.
SearchPath = str | os.PathLike[str]
#: Candidates whose ids one resolver learns, each from its first bytes; and files with the right
#: header that it opens although they turn out to be damaged.
MAX_CANDIDATES, MAX_FAILED = 4096, 16


class FileResolver:
    """Locate vkv files by id. Folders are listed once, when first needed.

    Args:
        search_paths: Files and folders, searched in this order.
    """

    def __init__(self, search_paths: Iterable[SearchPath] = ()):
        self.search_paths = [_search_path(x) for x in search_paths]
        self._known: dict[FileId, list[Path | str]] = {}
        self._unread = self._learn()
        self._failed, self._ended = 0, ""

    def open(self, file_id: FileId, check: Callable[[Document], object] | None = None) -> Document:
        """Open the file whose id is ``file_id``; of several, the first that is sound.

        Args:
            file_id: The id.
            check: Raises ``VkvError`` for a file whose tensors are damaged: the next with this id
                is tried. Headers are always checked.

        Raises:
            MissingFileError: No search path has it, or too many candidates would have to be
                read (H12); the message names the id.
            VkvError: Every file with this id is damaged: what ``check`` said of the first, by name.
        """
        damage: VkvError | None = None
        for path in self._candidates(file_id):
            if self._failed == MAX_FAILED:
                self._ended = f"after {MAX_FAILED} damaged files"
                break
            if not _has_id(path, file_id):
                continue
            try:
                document = open_document(path)
                wrong = _damage(document, check)
            except (VkvError, OSError):
                self._failed += 1
                continue
            if wrong is None:
                return document
            damage = damage or wrong
            self._failed += 1
        if damage is not None:
            raise damage
        paths = [urls.shown(x) if isinstance(x, str) else str(x) for x in self.search_paths]
        raise MissingFileError(file_id, paths, ended=self._ended)

    def _candidates(self, file_id: FileId) -> Iterator[Path | str]:
        """Yield files named by the id in any search path, then files that say they have it."""
        for path in self.search_paths:
            if isinstance(path, str):
                named = urls.name_of(path) == f"{file_id}.vkv"
                yield from [path] if named else [] if _is_file(path) else _in_folder(path, file_id)
            elif path.stem == file_id:
                yield path
            elif path.is_dir():
                yield path / f"{file_id}.vkv"
        yield from tuple(self._known.get(file_id, ()))
        for learnt, path in self._unread:
            if learnt == file_id:
                yield path

    def _learn(self) -> Iterator[tuple[FileId, Path | str]]:
        """Yield the id of each candidate; all searches of this resolver share one pass."""
        for count, path in enumerate(self._listed()):
            if count == MAX_CANDIDATES:
                self._ended = f"after {count:,} files"
                return
            if (learnt := _id_of(path)) is not None:
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


def _damage(document: Document, check: Callable[[Document], object] | None) -> VkvError | None:
    """Return what ``check`` says of a file, by its name; close it unless it is sound."""
    with ExitStack() as stack:
        stack.enter_context(document)
        try:
            if check is not None:
                check(document)
        except VkvError as exc:
            return exc.of_file(document.name)
        stack.pop_all()  # it stays open
    return None


def _search_path(value: SearchPath) -> Path | str:
    """Return a URL as it is, and anything else as a path.

    Raises:
        VkvError: It is neither text nor a path.
    """
    if isinstance(value, str) and is_url(value):
        return value
    if not isinstance(value, str | os.PathLike):
        kind = type(value).__name__
        raise VkvError(f"a search path is a {kind}, expected str or os.PathLike")
    return Path(value)


def _id_of(path: Path | str) -> FileId | None:
    """Return the id that a file says it has; ``None`` if it cannot be read or is no vkv file."""
    try:
        with _opened(path) as source:
            return container.peek_id(source)
    except (VkvError, OSError):
        return None


def _has_id(path: Path | str, file_id: FileId) -> bool:
    try:
        with _opened(path) as source:
            return container.has_id(source, file_id)
    except (VkvError, OSError):
        return False


def _opened(path: Path | str) -> closing[Source]:
    return closing(open_source(path) if isinstance(path, str) else FileSource(path))


def _is_file(url: str) -> bool:
    return urls.name_of(url).endswith(".vkv")


def _in_folder(url: str, file_id: FileId) -> list[str]:
    """Return where a folder without listing may have the file, named as by hand or in a store."""
    names = (f"{file_id}.vkv", f"{file_id[:2]}/{file_id}.vkv")
    return [urls.in_folder(url, name) for name in names]


def default_resolver(document: Document) -> FileResolver:
    """Return the resolver used when no search path is given: the folder of ``document``.

    For an object of a remote store the folder above is searched too.
    """
    if is_url(document.address):
        folder = urls.folder_of(document.address)
        in_store = urls.name_of(folder) == document.id[:2]
        return FileResolver([folder, urls.folder_of(folder)] if in_store else [folder])
    path = Path(document.address)
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
        names, size = external_references(head).get(document.id, []), document.size
        used = sum(head.tensors[name].nbytes for name in names)
        if used > size:
            document.close()
            raise HeaderError(
                f"{used} bytes are used of file {document.id[:16]}…, which has {size}",
                rule="H12",
                at="tensors",
            )
        self._head = head
        self._names = {
            _content(stored): name
            for name, stored in document.header.tensors.items()
            if stored.file is None
        }

    def check(self) -> None:
        """Compare the digests of all tensors of this file that the other refers to.

        Raises:
            HeaderError: One is not there (H12).
            DigestError: The bytes of one changed (D1).
        """
        for name in external_references(self._head).get(self.document.id, []):
            self.document.check(self.name(self._head.tensors[name], name))

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


def open_sound(resolver: FileResolver, file_id: FileId, head: Header) -> Dependency:
    """Open the first file with this id in which all that ``head`` refers to is undamaged.

    Reads and hashes those tensors.

    Raises:
        MissingFileError: There is no such file (H12).
        VkvError: All are damaged; the message names the first.
    """
    document = resolver.open(file_id, lambda document: Dependency(document, head).check())
    return Dependency(document, head)


def _content(stored: Stored) -> tuple[bytes, str, tuple[int, ...]]:
    return stored.digest, stored.dtype, stored.shape
