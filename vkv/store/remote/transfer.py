"""Fetch files from a remote: whole or not at all, and continued after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from vkv._atomic import repeated, sync_directory
from vkv.errors import DigestError
from vkv.format.container_write import write_all
from vkv.format.document import Document
from vkv.sources.base import READ_CHUNK, Source
from vkv.sources.local import FileSource
from vkv.store.remote.daemon_pool import DaemonPool

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], object]
#: Ranges under way at once; as many chunks are in memory.
RANGES_AT_ONCE = 4


def check(document: Document, key: str) -> None:
    """Check that every byte of ``document`` is that of the file with id ``key``.

    Raises:
        DigestError: It is another file, or its bytes changed (D1).
    """
    expect(document, key)
    document.check_all()


def expect(document: Document, key: str) -> None:
    """Check that the header of ``document`` is that of the file with id ``key`` (D1)."""
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
            behind when the transfer is interrupted, and continued by the next.
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


def partial_path(dest: Path, key: str) -> Path:
    """Return where the bytes of the file with id ``key`` wait until they become ``dest``."""
    return dest.with_name(f".{repeated(dest.name)}.{key[:16]}.vkv-part")


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[int]:
    """Open the partial file, after waiting for another process that writes it."""
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
    """Copy bytes from ``start`` on: several ranges at once, written in order."""
    os.ftruncate(fd, start)
    coming: deque[tuple[int, Future[bytes]]] = deque()
    pool = DaemonPool(RANGES_AT_ONCE, "vkv-pull")
    try:
        for at in range(start, source.size, READ_CHUNK):
            coming.append((at, pool.submit(source.read, at, min(READ_CHUNK, source.size - at))))
            if len(coming) == RANGES_AT_ONCE:
                _write_chunk(fd, *coming.popleft(), source.size, progress)
        while coming:
            _write_chunk(fd, *coming.popleft(), source.size, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _write_chunk(
    fd: int, at: int, came: Future[bytes], total: int, progress: Progress | None
) -> None:
    data = came.result()
    write_all(fd, data, at)
    if progress is not None:
        progress(at + len(data), total)


def _check_part(fd: int, key: str, dest: Path) -> None:
    with Document(FileSource(fd), os.fspath(dest)) as document:
        check(document, key)
