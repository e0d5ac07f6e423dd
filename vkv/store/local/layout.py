"""Lay out the folders of a store::

    root/objects/ab/abcd….vkv     one file an entry, named by its id
    root/incoming/PID-RANDOM/     a file that is being written; locked by its writer
    root/index-1.sqlite           the index, built from the files

Directories are 0700, files 0600: they hold people's prompts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from vkv.errors import VkvError
from vkv.format.file_id import is_file_id

MODE = 0o700
#: Another layout of the index is another file: two releases may share a store.
INDEX = "index-1.sqlite"
SUFFIX = ".vkv"


def default_root() -> Path:
    """Return the folder of the store that is used when none is named."""
    from vkv._paths import cache_dir

    return cache_dir() / "store"


class Layout:
    """Locate the folders and files of one store."""

    def __init__(self, root: Path, *, parents: bool = True):
        self.root, self._parents = root, parents
        self.objects, self.incoming = root / "objects", root / "incoming"
        self.index = root / INDEX

    def path(self, key: str) -> Path:
        """Return the file of entry ``key``.

        Raises:
            VkvError: It is not an id. The index is only a file: an id in it could be any path.
        """
        if not is_file_id(key):
            raise VkvError(
                f"the id is {str(key)[:80]!r}, expected 64 hex digits; `vkv store reindex` builds "
                "a new index from the files",
                at=str(self.index),
            )
        return self.objects / key[:2] / f"{key}{SUFFIX}"

    def files(self) -> Iterator[Path]:
        """Yield every ``.vkv`` file among the objects, in order; other files are not ours."""
        for folder in sorted(self.objects.glob("*")) if ours(self.objects) else ():
            if folder.is_dir() and ours(folder):
                yield from sorted(folder.glob(f"*{SUFFIX}"))

    def make(self) -> None:
        """Create what is missing.

        Raises:
            VkvError: A folder of the store is a link; or the folder that would hold the
                store does not exist.
        """
        self.check_parents()
        self._refuse_links(self.objects, self.incoming)
        for path in (self.root, self.objects, self.incoming):
            path.mkdir(mode=MODE, parents=path == self.root, exist_ok=True)

    def check_parents(self) -> None:
        """Refuse to make a store where the folder above it is missing, unless that was asked for.

        Raises:
            VkvError: It is missing.
        """
        if not (self._parents or self.root.parent.is_dir()):
            raise VkvError(
                f"no folder {self.root.parent}, expected one to make the store in; mount its disk, "
                "create it, or pass parents=True (--parents)",
                at=str(self.root),
            )

    def accept(self, written: Path, key: str) -> Path:
        """Move a finished file to its place; ``sync_directory`` its folder when there is time.

        Raises:
            VkvError: As ``make``.
        """
        target = self.path(key)
        self._refuse_links(self.objects, target.parent)
        target.parent.mkdir(mode=MODE, exist_ok=True)
        os.replace(written, target)
        return target

    def remove(self, key: str) -> None:
        """Remove the file of an entry; nothing happens if it is gone.

        Raises:
            VkvError: As ``make``, or as ``path``.
            OSError: It cannot be removed.
        """
        path = self.path(key)
        self._refuse_links(self.objects, path.parent)
        path.unlink(missing_ok=True)

    @staticmethod
    def _refuse_links(*folders: Path) -> None:
        for folder in folders:
            if not ours(folder):
                raise VkvError(
                    "a link, expected a folder that belongs to the store; remove the link",
                    at=str(folder),
                )

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a staging folder, locked by this process and removed after the block."""
        self.make()
        folder, fd = self._locked()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)

    def _locked(self) -> tuple[Path, int]:
        while True:
            folder = self.incoming / f"{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir(mode=MODE)
            with contextlib.suppress(FileNotFoundError):  # swept before it was locked
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if folder.exists():
                    return folder, fd
                os.close(fd)

    def abandoned(self) -> list[Path]:
        """Return what dead writers left behind."""
        exists = self.incoming.is_dir() and ours(self.incoming)
        left = self.incoming.iterdir() if exists else ()
        return [path for path in left if unlocked(path)]


def ours(folder: Path) -> bool:
    """Return whether a folder of a store may be emptied: behind a link are files of others.

    The root is another matter: whoever names it chose where it leads.
    """
    return not folder.is_symlink()


def clear(path: Path) -> None:
    """Remove a file or a folder with all in it, unless a writer holds its lock.

    The lock is held meanwhile, so that a writer that has just made its folder finds it
    gone, not half there.
    """
    unlocked(path, _remove)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unlocked(path: Path, act: Callable[[Path], None] = lambda _: None) -> bool:
    """Return whether nobody holds the lock of ``path``; then ``act`` is called under it.

    A dead process lets go of its locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        act(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
