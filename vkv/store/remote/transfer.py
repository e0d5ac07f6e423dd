"""Files moved to and from a remote: whole or not at all, and taken up where they were left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from vkv._atomic import sync_directory
from vkv.errors import DigestError
from vkv.format.container_write import write_all
from vkv.format.document import Document
from vkv.sources.backend_errors import naming
from vkv.sources.base import READ_CHUNK, Source
from vkv.sources.local import FileSource

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], object]
#: Ranges under way at once; as many chunks are in memory.
AHEAD = 4
#: Back ends where an object appears whole when its upload ends, or not at all.
WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "hf", "memory"})


def check(document: Document, key: str) -> None:
    """Every byte of ``document`` is what the file with id ``key`` has.

    Raises:
        DigestError: It is another file, or its bytes changed (D1).
    """
    expect(document, key)
    document.check_all()


def expect(document: Document, key: str) -> None:
    """The header of ``document`` is that of the file with id ``key``."""
    if document.id != key:
        text = f"id {document.id[:16]}…, expected {key[:16]}…: it is another file"
        raise DigestError(text, rule="D1", at=document.name)


def download(
    document: Document, key: str, dest: Path, part: Path, progress: Progress | None = None
) -> None:
    """Copy an open document to ``dest``, checked by id and digests before it takes that name.

    Args:
        document: Behind a URL.
        key: The id it must have.
        dest: Replaced in one step.
        part: Holds what has come so far, in the same file system as ``dest``; left
            behind when the transfer is interrupted, and gone on from by the next.
        progress: Called with (bytes done, bytes in all).

    Raises:
        DigestError: Not the bytes of ``key``; ``part`` is removed.
        OSError: The source cannot be read or the file not written.
    """
    expect(document, key)
    with _partial(part) as fd:
        start = os.fstat(fd).st_size
        _copy(document.source, fd, start if start <= document.size else 0, progress)
        try:
            _check_part(fd, key, dest)
        except Exception:
            if start == 0:
                part.unlink()
                raise
            _copy(document.source, fd, 0, progress)  # what had come before may be at fault
            _check_part(fd, key, dest)
        os.fsync(fd)
        os.replace(part, dest)
    sync_directory(dest.parent)


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[int]:
    """The open partial file; waits for another process that writes it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # else the other has finished, and taken it away
                yield fd
                return
        finally:
            os.close(fd)


def _copy(source: Source, fd: int, start: int, progress: Progress | None) -> None:
    """Bytes from ``start`` on, several ranges at once, written in order."""
    os.ftruncate(fd, start)
    coming: deque[tuple[int, Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(AHEAD, "vkv-pull")
    try:
        for at in range(start, source.size, READ_CHUNK):
            coming.append((at, pool.submit(source.read, at, min(READ_CHUNK, source.size - at))))
            if len(coming) == AHEAD:
                _take(fd, *coming.popleft(), source.size, progress)
        while coming:
            _take(fd, *coming.popleft(), source.size, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _take(fd: int, at: int, came: Future[bytes], total: int, progress: Progress | None) -> None:
    data = came.result()
    write_all(fd, data, at)
    if progress is not None:
        progress(at + len(data), total)


def _check_part(fd: int, key: str, dest: Path) -> None:
    with Document(FileSource(fd), os.fspath(dest)) as document:
        check(document, key)


def upload(
    files: AbstractFileSystem,
    path: Path,
    root: str,
    target: str,
    url: str,
    progress: Progress | None = None,
) -> None:
    """Send a file to ``root/target``, where it appears whole or not at all.

    Raises:
        OSError: It cannot be read or stored; nothing has the name ``target``.
    """
    from fsspec.callbacks import Callback

    def tell(size: int | None, value: int, **_: object) -> None:
        if progress is not None and size:
            progress(value, size)

    options = {"callback": Callback(hooks={"progress": tell})}
    with naming(url):
        if is_flat(files):
            files.put_file(os.fspath(path), f"{root}/{target}", **options)
            return
        temp = f"{root}/incoming/{os.getpid()}-{secrets.token_hex(4)}"
        for name in (temp, f"{root}/{target}"):
            files.makedirs(os.fspath(PurePosixPath(name).parent), exist_ok=True)
        try:
            files.put_file(os.fspath(path), temp, **options)
            files.mv(temp, f"{root}/{target}")
        except BaseException:
            with contextlib.suppress(Exception):
                files.rm_file(temp)
            raise


def is_flat(files: AbstractFileSystem) -> bool:
    """Whether objects appear whole, and directories need not be made."""
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    return not WHOLE.isdisjoint(protocols)
