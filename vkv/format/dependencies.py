"""Other vkv files that one stands on, found by id in files and folders (H12).

A file's name says nothing about its id, so a name that is the id is tried first, then
the ids of all candidates are learnt, each once, from the bytes of their headers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vkv.errors import HeaderError, MissingFileError, VkvError
from vkv.format import container, container_write
from vkv.format.document import Document, open_document
from vkv.format.limits import MAX_HEADER
from vkv.format.schema import Header, Stored
from vkv.sources.local import FileSource
from vkv.sources.opening import open_source
from vkv.sources.urls import is_url

#: A file, or a folder whose ``.vkv`` files are looked at. Of a folder behind a URL only
#: names that are the id.
Place = str | os.PathLike[str]
#: Files whose ids one search learns, and bytes of JSON and headers that it reads for them.
MAX_LOOKED_AT, MAX_LOOKED_BYTES = 4096, 64 << 20


class Files:
    """Finds vkv files by id. What is in the places is listed once, when it is needed.

    Args:
        places: Files and folders, searched in this order.
    """

    def __init__(self, places: Iterable[Place] = ()):
        self.places = [x if isinstance(x, str) and is_url(x) else Path(x) for x in places]
        self._known: dict[str, list[Path | str]] = {}
        self._unread = self._learn()
        self._ended = ""

    def open(self, key: bytes) -> Document:
        """The file whose id is ``key``.

        Raises:
            MissingFileError: No place has it (H12), or too much would have to be looked
                at; the message names the id.
        """
        name = key.hex()
        for path in self._candidates(name):
            try:
                document = open_document(path)
            except (VkvError, OSError):
                continue
            if document.id == name:
                return document
            document.close()
        raise MissingFileError(name, [str(place) for place in self.places], ended=self._ended)

    def _candidates(self, name: str) -> Iterator[Path | str]:
        """Files named by the id in any place, then those of that id."""
        for place in self.places:
            if isinstance(place, str):
                own = place.rpartition("/")[2] == f"{name}.vkv"
                yield from [place] if own else [] if _is_one(place) else _in_folder(place, name)
            elif place.stem == name:
                yield place
            elif place.is_dir():
                yield place / f"{name}.vkv"
        yield from tuple(self._known.get(name, ()))
        for found, path in self._unread:
            if found == name:
                yield path

    def _learn(self) -> Iterator[tuple[str, Path | str]]:
        """Ids of all candidates, one by one, for all searches of this object together."""
        looked = read = 0
        for path in self._listed():
            if looked == MAX_LOOKED_AT or read >= MAX_LOOKED_BYTES:
                self._ended = f"after {looked:,} files and {read:,} bytes of headers"
                return
            found, nbytes = _id_of(path)
            looked, read = looked + 1, read + nbytes
            if found is not None:
                self._known.setdefault(found, []).append(path)
                yield found, path

    def _listed(self) -> Iterator[Path | str]:
        for place in self.places:
            if isinstance(place, str):
                yield from [place] if _is_one(place) else []
            elif place.is_dir():
                yield from sorted(place.glob("*.vkv"))
            else:
                yield place


def _id_of(path: Path | str) -> tuple[str | None, int]:
    """Id of a file whose header is not decoded, if it may be one, and the bytes it took."""
    nbytes = 0
    try:
        source = open_source(path) if isinstance(path, str) else FileSource(path)
        try:
            nbytes = min(int.from_bytes(source.read(0, 8), "little"), container.MAX_JSON)
            entry = container.parse(source)[container.HEADER]
            if entry.nbytes > MAX_HEADER:
                return None, nbytes
            nbytes += entry.nbytes
            return container_write.digest(source.read(entry.start, entry.nbytes)).hex(), nbytes
        finally:
            source.close()
    except (VkvError, OSError):
        return None, nbytes


def _is_one(url: str) -> bool:
    return url.endswith(".vkv")


def beside(document: Document) -> Files:
    """Where a file is looked for when nothing was said: the folder of ``document``."""
    if is_url(document.name):
        folder = document.name.rpartition("/")[0]
        above, _, last = folder.rpartition("/")
        return Files([folder, above] if last == document.id[:2] else [folder])
    path = Path(document.name)
    return Files([path.parent] if path.is_file() else ())


def searched(
    document: Document, places: Iterable[Place] | None, more: Iterable[Place] = ()
) -> Files:
    """``places``, or where is looked when none were given, and ``more``."""
    return Files([*(beside(document).places if places is None else places), *more])


def _in_folder(url: str, name: str) -> list[str]:
    """Where a folder that cannot be listed has a file: by its name, or as a store has it."""
    folder = url.rstrip("/")
    return [f"{folder}/{name}.vkv", f"{folder}/{name[:2]}/{name}.vkv"]


class Other:
    """One file that another stands on, and where in it a stored tensor is.

    Args:
        document: Closed if it is refused.
        head: Of the other file.

    Raises:
        HeaderError: More bytes than the file has (H12).
    """

    def __init__(self, document: Document, head: Header):
        self.document = document
        own, held = bytes.fromhex(document.id), document.size
        asked = sum(stored.nbytes for stored in head.tensors.values() if stored.file == own)
        if asked > held:
            document.close()
            raise HeaderError(
                f"{asked} bytes are taken from file {document.id[:16]}…, which has {held}",
                rule="H12",
                at="tensors",
            )
        self._names = {
            _key(stored): name
            for name, stored in document.header.tensors.items()
            if stored.file is None
        }

    def name(self, stored: Stored, at: str) -> str:
        """Name in this file of the tensor that ``stored`` speaks of.

        Raises:
            HeaderError: The file holds no such tensor (H12).
        """
        found = self._names.get(_key(stored))
        if found is None:
            raise HeaderError(
                f"file {self.document.id[:16]}… holds no {stored.dtype} {stored.shape} of digest "
                f"{stored.digest.hex()[:16]}…",
                rule="H12",
                at=at,
            )
        return found


def _key(stored: Stored) -> tuple[bytes, str, tuple[int, ...]]:
    return stored.digest, stored.dtype, stored.shape
