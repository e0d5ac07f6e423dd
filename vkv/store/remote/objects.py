"""Store and list the objects of a remote, a directory behind any URL that fsspec can write.

::

    url/objects/ab/abcd….vkv                     one file an entry, named by its id
    url/keys/MODEL/HASH/TOKENS-ID                empty; one for each bound of its tokens
    url/exact/MODEL/TOKENS-HASH-ID               empty; instead, if it cannot be trimmed

There is no index: names are enough, so any number of machines may write without a
lock (``spec/decisions/0006-remote-layout.md``).
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from vkv.errors import VkvError
from vkv.format.document import Document, open_document
from vkv.format.file_id import is_file_id
from vkv.sources.backend_errors import naming
from vkv.sources.objects import filesystem
from vkv.sources.urls import is_url, shown
from vkv.store.local.layout import SUFFIX
from vkv.store.remote import upload
from vkv.store.remote.transfer import Progress

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class RemoteObjects:
    """Access the objects behind a URL; connections are made anew after a fork.

    Args:
        url: A directory.

    Raises:
        VkvError: No URL, an unknown scheme, or a package is missing.
    """

    def __init__(self, url: str):
        if not is_url(url):
            raise VkvError(f"{url!r} is no URL, expected one like s3://bucket/prompts")
        self.url = url.rstrip("/")
        self._web = self.url.lower().startswith(("http://", "https://"))
        self._connect()

    def __getstate__(self) -> str:
        return self.url

    def __setstate__(self, url: str) -> None:
        RemoteObjects.__init__(self, url)

    def _connect(self) -> None:
        self._process = os.getpid()
        self._files, root = filesystem(self.url)
        self.root = root.rstrip("/")

    @property
    def files(self) -> AbstractFileSystem:
        """fsspec's file system, of this process: a child cannot use its parent's."""
        if self._process != os.getpid():
            self._connect()
        return self._files

    def at(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}"

    def open(self, key: str) -> Document:
        """Open the file with id ``key`` for reading by range; that id is not checked."""
        return open_document(self.at(object_name(key)))

    def holds(self, key: str, size: int) -> bool:
        """Return whether the file with id ``key``, of so many bytes, is stored."""
        try:
            with self.open(key) as document:
                return (document.id, document.size) == (key, size)
        except (VkvError, FileNotFoundError):
            return False

    def sizes(self) -> list[tuple[str, int]]:
        """Return id and size of every file.

        Raises:
            VkvError: http has no listings.
            OSError: The remote cannot be listed.
        """
        self.check_listable()
        with naming(self.url):
            found = self.files.find(f"{self.root}/objects", detail=True)
        named = [(PurePosixPath(path).stem, int(info["size"])) for path, info in found.items()]
        return sorted((key, size) for key, size in named if is_file_id(key))

    def full_id(self, start: str) -> str:
        """Return the id that begins with ``start``.

        Raises:
            VkvError: None does, or several do.
        """
        if is_file_id(start):
            return start
        matches = []
        if len(start) >= 4 and not set(start) - set("0123456789abcdef"):
            names = [n.removesuffix(SUFFIX) for n in self.names(f"objects/{start[:2]}")]
            matches = [name for name in names if name.startswith(start) and is_file_id(name)]
        if len(matches) != 1:
            few = "no file" if not matches else f"{len(matches)} files"
            raise VkvError(f"{few} with an id that begins with {start!r}", at=shown(self.url))
        return matches[0]

    def has(self, name: str) -> bool:
        """Return whether there is an object, or a folder, ``name``."""
        try:
            with naming(self.at(name)):
                self.files.info(f"{self.root}/{name}")
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        self.check_listable()
        try:
            with naming(self.at(folder)):
                found = self.files.find(f"{self.root}/{folder}")
        except FileNotFoundError:
            return []
        return [PurePosixPath(path).name for path in found]

    def upload(self, path: Path, name: str, progress: Progress | None) -> None:
        """Send a file, which appears under ``name`` whole or not at all."""
        upload.upload(self.files, path, self.root, name, self.at(name), progress)

    def make_empty(self, names: list[str]) -> None:
        """Make empty objects; those that exist stay."""
        with naming(self.url):
            upload.make_empty(self.files, [f"{self.root}/{name}" for name in names])

    def check_listable(self) -> None:
        """Refuse a remote that cannot be listed.

        Raises:
            VkvError: http has no listings.
            ConnectionError: It has none, and cannot be reached either.
        """
        if self._web:
            self._reach()
            text = "http has no listings: files are pulled by their whole id"
            raise VkvError(text, at=shown(self.url))

    def _reach(self) -> None:
        try:
            with naming(self.url):
                self.files.cat_file(self.url, start=0, end=1)
        except ConnectionError:
            raise
        except (OSError, VkvError):  # a server that has no such page
            return

    def check_writable(self) -> None:
        """Refuse a remote that cannot be written.

        Raises:
            VkvError: It is behind http.
        """
        if self._web:
            raise VkvError("http can be read and not written", at=shown(self.url))


def object_name(key: str) -> str:
    """Return the name of the object of the file with id ``key``."""
    return f"objects/{key[:2]}/{key}{SUFFIX}"
