"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

#: ``.name.pid-random.vkv-tmp``; the pid is for people who find one.
_TEMP = re.compile(r"^\.(?P<name>.+)\.\d+-[0-9a-f]{8}\.vkv-tmp$", re.DOTALL)
#: Bytes of a name that a temporary name repeats; file systems take 255, and 30 are added.
MAX_REPEATED = 200
#: What ``fsync`` of a directory raises on file systems that cannot do it (CIFS, some FUSE).
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[int]:
    """Yield a file descriptor whose content becomes ``path`` when the block ends well.

    The bytes go to a temporary file in the same directory, are flushed, and take
    the name in one step; when the block raises, ``path`` is as it was. Mode is
    0600 (the files hold people's prompts). A file that is replaced hands on its owner,
    group and mode; where owner or group cannot be kept, nobody else gets access.
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
                _hand_on(target.stat(), fd)
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


def _hand_on(old: os.stat_result, fd: int) -> None:
    """Give the new file the owner, group and mode of the old one.

    A mode is a promise to a group: where the group cannot be kept, only the owner has access.
    """
    mode = stat.S_IMODE(old.st_mode)
    for owner in (old.st_uid, -1):  # another owner takes root; a group, a member
        with contextlib.suppress(PermissionError):
            os.fchown(fd, owner, old.st_gid)
            break
    new = os.fstat(fd)
    same = (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid)
    os.fchmod(fd, mode if same else mode & stat.S_IRWXU)


def temporary_name(name: str) -> str:
    """Return a name for a temporary file beside ``name``, not longer than 255 bytes."""
    return f".{repeated(name)}.{os.getpid()}-{secrets.token_hex(4)}.vkv-tmp"


def repeated(name: str) -> str:
    """Return ``name``, or a digest of it if it is too long to be a part of another name."""
    raw = os.fsencode(name)
    return name if len(raw) <= MAX_REPEATED else hashlib.sha256(raw).hexdigest()


def _unnamed(exc: BaseException, temp: Path) -> TypeGuard[OSError]:
    """Tell if an error of the file system names no file, or the temporary one."""
    named = isinstance(exc, OSError) and exc.filename not in (None, os.fspath(temp))
    return isinstance(exc, OSError) and exc.errno is not None and not named


def _create(target: Path) -> tuple[Path, int]:
    """Create a temporary file beside ``target``, locked for as long as it is open."""
    while True:
        temp = target.with_name(temporary_name(target.name))
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temp, fd
        os.close(fd)  # swept between its creation and its lock


def sync_directory(path: Path) -> None:
    """Flush a directory, so that names in it outlive a power cut.

    Warns where the file system cannot: the files themselves are whole.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _NO_SYNC:
            raise
        warnings.warn(
            f"{path}: this file system cannot flush a directory ({exc.strerror}); after a power "
            "cut the old file may stand there again",
            UserWarning,
            stacklevel=2,
        )
    finally:
        os.close(fd)


def _sweep(target: Path) -> None:
    """Remove what killed writers of ``target`` left; a living writer's file stays."""
    for entry in target.parent.glob(f".{_escape(repeated(target.name))}.*.vkv-tmp"):
        found = _TEMP.match(entry.name)
        if found and found["name"] == repeated(target.name):
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
