"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

#: ``.name.pid-random.vkv-tmp``; the pid is for people who find one.
_TEMP = re.compile(r"^\.(?P<name>.+)\.\d+-[0-9a-f]{8}\.vkv-tmp$", re.DOTALL)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[int]:
    """A file descriptor whose content becomes ``path`` when the block ends well.

    The bytes go to a temporary file in the same directory, are flushed, and take
    the name in one step; when the block raises, ``path`` is as it was. Mode is
    0600 (the files hold people's prompts), or that of the file replaced.
    Temporary files that dead writers of the same path left are removed first.

    Args:
        path: Where the file shall be. A symbolic link is followed.
        durable: ``fsync`` file and directory, so that a power cut keeps the old
            or the new file. Without it only a crash of the process does.

    Raises:
        OSError: The directory is missing or not writable, the disk is full, or what
            stands there is no regular file (a device, a pipe). It names ``path``.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "exists and is no regular file; it is not replaced", str(path))
    _sweep(target)
    try:
        temp, fd = _create(target)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
    try:
        try:
            yield fd
            if target.exists():
                os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            if durable:
                os.fsync(fd)
            os.replace(temp, target)
        finally:
            os.close(fd)
    except BaseException as exc:
        temp.unlink(missing_ok=True)
        if _unnamed(exc, temp):
            raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
        raise
    if durable:
        sync_directory(target.parent)


def _unnamed(exc: BaseException, temp: Path) -> TypeGuard[OSError]:
    """Whether an error of the file system names no file, or one nobody has heard of."""
    named = isinstance(exc, OSError) and exc.filename not in (None, os.fspath(temp))
    return isinstance(exc, OSError) and exc.errno is not None and not named


def _create(target: Path) -> tuple[Path, int]:
    """A new temporary file beside ``target``, locked for as long as it is open."""
    while True:
        temp = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.vkv-tmp")
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temp, fd
        os.close(fd)  # swept between its creation and its lock


def sync_directory(path: Path) -> None:
    """Flush a directory, so that names in it outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sweep(target: Path) -> None:
    """Remove what killed writers of ``target`` left; a living writer's file stays."""
    for entry in target.parent.glob(f".{_escape(target.name)}.*.vkv-tmp"):
        found = _TEMP.match(entry.name)
        if found and found["name"] == target.name:
            with contextlib.suppress(OSError):
                _remove_if_dead(entry)


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _remove_if_dead(temp: Path) -> None:
    """Unlink ``temp`` unless its writer holds its lock.

    A lock, unlike a process id, is not given to another process later and means the
    same in every container that shares the directory.

    Raises:
        OSError: It is locked, gone, or not ours.
    """
    fd = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temp.unlink()
    finally:
        os.close(fd)
