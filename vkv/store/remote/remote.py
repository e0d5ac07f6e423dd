"""Push, pull and find entries on another machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkv.errors import VkvError
from vkv.format.dependencies import SearchPath, resolver_for
from vkv.format.document import Document, open_document
from vkv.format.layers import external_references
from vkv.sources.urls import shown
from vkv.store.local.layout import SUFFIX
from vkv.store.local.lookup import but_last
from vkv.store.local.summary import describe, is_entry
from vkv.store.remote import keys, remote_search, transfer
from vkv.store.remote.objects import RemoteObjects, object_name
from vkv.store.remote.remote_search import Match
from vkv.store.remote.transfer import Progress


class Remote:
    """Push, pull and find entries behind a URL.

    Args:
        url: A directory: ``s3://bucket/prompts``, ``gs://…``, ``hf://…``,
            ``file://…``; by ``http(s)://`` entries can be pulled and not found or pushed.

    Attributes:
        url: The same, without a slash at its end.
        objects: The objects behind it.

    Raises:
        VkvError: No URL, an unknown scheme, or a package is missing.
    """

    def __init__(self, url: str):
        self.objects = RemoteObjects(url)
        self.url = self.objects.url

    def __repr__(self) -> str:
        return f"<Remote {shown(self.url)!r}>"

    def push(
        self,
        path: str | os.PathLike[str],
        *,
        search_paths: Iterable[SearchPath] | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Store a file, after its dependencies, and return its id.

        Files that are there already are not sent again. A file with the bytes is named by
        each that needs them (H11), so the dependencies of a dependency are not sent for it:
        it can be found by tokens only if all of those come along too.

        Args:
            path: A local ``.vkv`` file. One without model or token ids is stored too,
                and is found by its id alone.
            search_paths: Files and folders with its dependencies, as in ``vkv.load``.
            progress: Called with (bytes done, bytes in all).

        Raises:
            VkvError: A file is damaged, a dependency is missing, or a file did not
                arrive as it was sent.
            OSError: It cannot be read, or the remote cannot be written.
        """
        self.objects.check_writable()
        with open_document(os.fspath(path)) as document:
            _check_all(document)
            files = [_file(document, os.fspath(path))]
            resolver = resolver_for(document, search_paths)
            for key in external_references(document.header):
                with resolver.open(key, _check_all) as dependency:
                    files.insert(0, _file(dependency, dependency.name))
        for file in files:
            self._send(file, progress)
        sent = {file.key for file in files}
        self.objects.make_empty([n for f in files if f.dependencies <= sent for n in f.names])
        return files[-1].key

    def _send(self, file: _File, progress: Progress | None) -> None:
        if self.objects.holds(file.key, file.size):
            return
        target = object_name(file.key)
        self.objects.upload(Path(file.path), target, progress)
        if not self.objects.holds(file.key, file.size):
            raise VkvError("it did not arrive as it was sent", at=shown(self.objects.at(target)))

    def pull(
        self,
        key: str,
        dest: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
    ) -> Path:
        """Fetch a file and, beside it, its dependencies, named by their ids.

        Each is checked by id and digests before it takes its name. What an interrupted
        transfer left in ``.NAME.ID.vkv-part`` beside it is continued. The dependencies of
        a dependency are not fetched: the file needs none of them (H11).

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
            for needed in external_references(document.header):
                target = path.with_name(f"{needed}{SUFFIX}")
                if not _is_file(target, needed):
                    with self.open(needed) as dependency:
                        _download(dependency, needed, target, progress)
            _download(document, key, path, progress)
        return path

    def find(
        self,
        tokens: Any,
        *,
        model: Any,
        longer_than: int = 0,
        refused: Iterable[str] = (),
    ) -> Match | None:
        """Find the longest stored prefix of a prompt.

        Asks for names, then reads header and tokens of the best entry. An entry is
        found by the bounds of its tokens (``vkv.store.remote.keys``): one that shares more
        tokens, but no further bound, may stay unseen.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model, or its id (bytes or hex).
            longer_than: Only longer prefixes matter.
            refused: Ids that are left out.

        Raises:
            VkvError: The remote cannot be listed.
            OSError: It cannot be reached.
        """
        from vkv import identity

        self.objects.check_listable()
        data, owner = but_last(identity.token_bytes(tokens)), identity.model_id(model)
        return remote_search.longest(self.objects, data, owner, longer_than, frozenset(refused))

    def ls(self) -> list[tuple[str, int]]:
        """Return id and size of every file.

        Raises:
            VkvError: http has no listings.
            OSError: The remote cannot be listed.
        """
        return self.objects.sizes()

    def full_id(self, start: str) -> str:
        """Return the id that begins with ``start``.

        Raises:
            VkvError: None does, or several do.
        """
        return self.objects.full_id(start)

    def open(self, key: str) -> Document:
        """Open the file with id ``key`` for reading by range; that id is not checked."""
        return self.objects.open(key)

    def holds(self, key: str, size: int) -> bool:
        """Return whether the file with id ``key``, of so many bytes, is stored."""
        return self.objects.holds(key, size)


def _is_file(path: Path, key: str) -> bool:
    try:
        with open_document(path) as document:
            return document.id == key
    except (VkvError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is to be sent, and the names that it is found by."""

    path: str
    key: str
    size: int
    dependencies: frozenset[str]
    names: list[str]


def _check_all(document: Document) -> None:
    """Check every byte, so that damage is not passed on."""
    transfer.check(document, document.id)


def _file(document: Document, path: str) -> _File:
    needed = frozenset(external_references(document.header))
    return _File(path, document.id, document.size, needed, _names(document))


def _download(document: Document, key: str, path: Path, progress: Progress | None) -> None:
    transfer.download(document, key, path, transfer.partial_path(path, key), progress)


def _names(document: Document) -> list[str]:
    """Return the names that a file is found by; one of no model or tokens has only its id."""
    return keys.names(describe(document)) if is_entry(document) else []
