"""Other vkv files that one stands on, found by id in files and folders (H12).

A file's name says nothing about its id, so candidates are opened and their headers
read, a name that is the id first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vkv.document import Document, open_document
from vkv.errors import HeaderError, MissingFileError, VkvError
from vkv.header import Stored
from vkv.remote_source import is_url

#: A file, or a folder whose ``.vkv`` files are looked at. Of a folder behind a URL only
#: names that are the id.
Place = str | os.PathLike[str]
#: Files of a folder that are opened in search of an id.
MAX_LOOKED_AT = 4096


class Files:
    """Finds vkv files by id.

    Args:
        places: Files and folders, searched in this order.
    """

    def __init__(self, places: Iterable[Place] = ()):
        self.places = [x if isinstance(x, str) and is_url(x) else Path(x) for x in places]

    def open(self, key: bytes) -> Document:
        """The file whose id is ``key``.

        Raises:
            MissingFileError: No place has it (H12); the message names the id.
        """
        for path in self._candidates(key.hex()):
            try:
                document = open_document(path)
            except (VkvError, OSError):
                continue
            if document.id == key.hex():
                return document
            document.close()
        raise MissingFileError(key.hex(), [str(place) for place in self.places])

    def _candidates(self, name: str) -> Iterator[Path | str]:
        """Files named by the id in any place, then all others."""
        for place in self.places:
            if isinstance(place, str):
                yield from [place] if place.endswith(".vkv") else _in_folder(place, name)
            elif place.stem == name:
                yield place
            elif place.is_dir():
                yield place / f"{name}.vkv"
        for place in self.places:
            if isinstance(place, str):
                continue
            if place.is_dir():
                yield from sorted(place.glob("*.vkv"))[:MAX_LOOKED_AT]
            else:
                yield place


def beside(document: Document) -> Files:
    """Where a file is looked for when nothing was said: the folder of ``document``."""
    if is_url(document.name):
        folder = document.name.rpartition("/")[0]
        above, _, last = folder.rpartition("/")
        return Files([folder, above] if last == document.id[:2] else [folder])
    path = Path(document.name)
    return Files([path.parent] if path.is_file() else ())


def _in_folder(url: str, name: str) -> list[str]:
    """Where a folder that cannot be listed has a file: by its name, or as a store has it."""
    folder = url.rstrip("/")
    return [f"{folder}/{name}.vkv", f"{folder}/{name[:2]}/{name}.vkv"]


class Other:
    """One file that another stands on, and where in it a stored tensor is.

    Args:
        document: Closed if it is refused.
        used: All tensors that the other file takes from it.

    Raises:
        HeaderError: More bytes than the file has (H12).
    """

    def __init__(self, document: Document, used: Iterable[Stored]):
        self.document = document
        asked, held = sum(stored.nbytes for stored in used), document.size
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
