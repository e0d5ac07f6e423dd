"""A store on another machine: a directory behind any URL that fsspec can write.

::

    url/objects/ab/abcd….vkv                     one file an entry, named by its id
    url/keys/MODEL/HASH/TOKENS-ID                empty; one for each bound of its tokens
    url/exact/MODEL/TOKENS-HASH-ID               empty; instead, if it cannot be trimmed

There is no index: names are enough, so any number of machines may write without a
lock (``spec/decisions/0006-remote-layout.md``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vkv._atomic import repeated
from vkv.errors import CacheError, VkvError
from vkv.format.dependencies import SearchPath, resolver_for
from vkv.format.document import Document, open_document
from vkv.format.file_id import is_file_id
from vkv.format.layers import external_references
from vkv.sources.backend_errors import naming
from vkv.sources.objects import filesystem
from vkv.sources.urls import is_url, shown
from vkv.store.local import summary as describe
from vkv.store.local.layout import SUFFIX
from vkv.store.local.lookup import but_last
from vkv.store.remote import keys, transfer
from vkv.store.remote import remote_search as seek
from vkv.store.remote.remote_search import Match
from vkv.store.remote.transfer import Progress


class Remote:
    """Entries behind a URL, pushed, pulled and found by their tokens.

    Args:
        url: A directory: ``s3://bucket/prompts``, ``gs://…``, ``hf://…``,
            ``file://…``; by ``http(s)://`` entries can be pulled and not found or pushed.

    Raises:
        VkvError: No URL, an unknown scheme, or a package is missing.
    """

    def __init__(self, url: str):
        if not is_url(url):
            raise VkvError(f"{url!r} is no URL, expected one like s3://bucket/prompts")
        self.url = url.rstrip("/")
        self._files, root = filesystem(self.url)
        self._root = root.rstrip("/")
        self._web = self.url.lower().startswith(("http://", "https://"))

    def __repr__(self) -> str:
        return f"<Remote {shown(self.url)!r}>"

    def push(
        self,
        path: str | os.PathLike[str],
        *,
        search_paths: Iterable[SearchPath] | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Store a file, after those that it stands on; its id.

        What is there already is not sent again. A file that has the bytes is named by
        each that needs them (H11), so what a base itself stands on is not sent for it: a
        base can be found by tokens only if all of that comes along too.

        Args:
            path: A local ``.vkv`` file. One without model or token ids is stored too,
                and is found by its id alone.
            search_paths: Where the files it depends on are looked for, as in ``vkv.load``.
            progress: Called with (bytes done, bytes in all).

        Raises:
            VkvError: A file is damaged, stands on one that is missing, or did not
                arrive as it was sent.
            OSError: It cannot be read, or the remote cannot be written.
        """
        self._writable()
        with open_document(os.fspath(path)) as document:
            sent = [_checked(document, os.fspath(path))]
            resolver = resolver_for(document, search_paths)
            for base in external_references(document.header):
                with resolver.open(base) as other:
                    sent.insert(0, _checked(other, other.name))
        for file in sent:
            self._send(file, progress)
        there = {file.key for file in sent}
        self._make([name for file in sent if file.bases <= there for name in file.names])
        return sent[-1].key

    def _send(self, file: _File, progress: Progress | None) -> None:
        if self.holds(file.key, file.size):
            return
        target = object_name(file.key)
        url = self._at(target)
        transfer.upload(self._files, Path(file.path), self._root, target, url, progress)
        if not self.holds(file.key, file.size):
            raise VkvError("it did not arrive as it was sent", at=shown(url))

    def pull(
        self,
        key: str,
        dest: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
    ) -> Path:
        """Fetch a file, and beside it those that it stands on, named by their ids.

        Each is checked by id and digests before it takes its name. What an interrupted
        transfer left in ``.NAME.ID.vkv-part`` beside it is gone on from. What a base
        stands on itself is not fetched for it: the file needs none of that (H11).

        Args:
            key: Its id, or the beginning of one that only it has.
            dest: The file to write, or a directory, where its name will be its id.
            progress: Called with (bytes done, bytes in all).

        Raises:
            VkvError: No such id, or not the bytes that it stands for.
            OSError: The remote cannot be read, or ``dest`` not be written.
        """
        key = self.full_id(key)
        path = Path(dest)
        path = path / f"{key}{SUFFIX}" if path.is_dir() else path
        with self.open(key) as document:
            transfer.expect(document, key)
            for base in external_references(document.header):
                own = path.with_name(f"{base}{SUFFIX}")
                if not _is_file(own, base):
                    with self.open(base) as other:
                        _download(other, base, own, progress)
            _download(document, key, path, progress)
        return path

    def find(self, tokens: Any, *, model: Any, longer_than: int = 0) -> Match | None:
        """The longest stored prefix of a prompt.

        Asks for names, then reads header and tokens of the best entry. An entry is
        found by the bounds of its tokens (``vkv.store.remote.keys``): one that shares more
        tokens, but no further bound, may stay unseen.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model, or its id (bytes or hex).
            longer_than: Only longer prefixes matter.

        Raises:
            VkvError: The remote cannot be listed.
            OSError: It cannot be reached.
        """
        from vkv import identity

        self.listable()
        data = but_last(identity.token_bytes(tokens))
        return seek.longest(self, data, identity.model_id(model), longer_than)

    def ls(self) -> list[tuple[str, int]]:
        """Id and size of every file.

        Raises:
            VkvError: http has no listings.
            OSError: The remote cannot be listed.
        """
        self.listable()
        with naming(self.url):
            found = self._files.find(f"{self._root}/objects", detail=True)
        named = [(PurePosixPath(path).stem, int(info["size"])) for path, info in found.items()]
        return sorted((key, size) for key, size in named if is_file_id(key))

    def full_id(self, start: str) -> str:
        """The id that begins with ``start``.

        Raises:
            VkvError: None does, or several do.
        """
        if is_file_id(start):
            return start
        found = []
        if len(start) >= 4 and not set(start) - set("0123456789abcdef"):
            found = [n.removesuffix(SUFFIX) for n in self.names(f"objects/{start[:2]}")]
            found = [name for name in found if name.startswith(start) and is_file_id(name)]
        if len(found) != 1:
            few = "no file" if not found else f"{len(found)} files"
            raise VkvError(f"{few} with an id that begins with {start!r}", at=shown(self.url))
        return found[0]

    def open(self, key: str) -> Document:
        """The file with id ``key``, to be read by range; whether it has that id is not checked."""
        return open_document(self._at(object_name(key)))

    def _at(self, name: str) -> str:
        return f"{self.url}/{name}"

    def holds(self, key: str, size: int) -> bool:
        """Whether the file with id ``key``, of so many bytes, is there."""
        try:
            with self.open(key) as document:
                return (document.id, document.size) == (key, size)
        except (VkvError, FileNotFoundError):
            return False

    def has(self, name: str) -> bool:
        """Whether there is an object, or a folder, ``name``."""
        try:
            with naming(self._at(name)):
                self._files.info(f"{self._root}/{name}")
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """Names in a folder; none if there is no such folder."""
        self.listable()
        try:
            with naming(self._at(folder)):
                found = self._files.find(f"{self._root}/{folder}")
        except FileNotFoundError:
            return []
        return [PurePosixPath(path).name for path in found]

    def _make(self, names: list[str]) -> None:
        """Make empty objects; those that are there stay."""
        paths = [f"{self._root}/{name}" for name in names]
        with naming(self.url):
            if not transfer.is_flat(self._files):
                for folder in {os.fspath(PurePosixPath(path).parent) for path in paths}:
                    self._files.makedirs(folder, exist_ok=True)
            self._files.pipe(dict.fromkeys(paths, b""))

    def listable(self) -> None:
        """Refuse a remote where nothing can be found.

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
                self._files.cat_file(self.url, start=0, end=1)
        except ConnectionError:
            raise
        except (OSError, VkvError):  # a server that has no such page
            return

    def _writable(self) -> None:
        if self._web:
            raise VkvError("http can be read and not written", at=shown(self.url))


def _is_file(path: Path, key: str) -> bool:
    try:
        with open_document(path) as document:
            return document.id == key
    except (VkvError, OSError):
        return False


def object_name(key: str) -> str:
    """Where the file with id ``key`` stands."""
    return f"objects/{key[:2]}/{key}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is to be sent, and what it is found by."""

    path: str
    key: str
    size: int
    bases: frozenset[str]
    names: list[str]


def _checked(document: Document, path: str) -> _File:
    """Damage is not passed on."""
    transfer.check(document, document.id)
    bases = frozenset(external_references(document.header))
    return _File(path, document.id, document.size, bases, _names(document))


def _download(document: Document, key: str, path: Path, progress: Progress | None) -> None:
    part = path.with_name(f".{repeated(path.name)}.{key[:16]}.vkv-part")
    transfer.download(document, key, path, part, progress)


def _names(document: Document) -> list[str]:
    try:
        return keys.names(describe.of(document))
    except CacheError:  # of no model or tokens: found by its id alone
        return []
