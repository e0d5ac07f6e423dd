"""Write a strict safetensors container: fixed layout, digests, threads.

The rules are those of ``vkv.format.container``, which reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Protocol

from blake3 import blake3

from vkv.errors import ContainerError
from vkv.format.dtypes import ITEMSIZE
from vkv.format.file_id import FileId, of_header
from vkv.format.framing import HEADER, Form, frame
from vkv.format.header import VERSION
from vkv.sources.base import READ_CHUNK, Buffer


class Pieces(Protocol):
    """Yield bytes piece by piece, in the thread that iterates."""

    nbytes: int

    def __iter__(self) -> Iterator[memoryview]: ...


def digest(data: Buffer, threads: int = 1) -> bytes:
    """Return the BLAKE3 of ``data``, 32 bytes."""
    return blake3(data, max_threads=threads).digest()


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``; the kernel takes at most 2 GiB a call."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + READ_CHUNK], offset + done)


#: Tensors in flight between the thread that makes them and those that hash and write. A GPU's
#: memory reaches the host page by page, so many threads must ask for it at once.
IN_FLIGHT = max(4, min(16, os.cpu_count() or 1))
#: Threads that write, each with one that hashes what it writes. A file takes one write at a time,
#: so that on two cores one of each is fastest.
WRITERS = max(1, min(IN_FLIGHT, (os.cpu_count() or 1) // 2))
#: Pieces of fewer bytes are hashed by the thread that writes them: handing over costs more.
LEAST_SHARED = 1 << 17


def write(
    fd: int,
    tensors: list[tuple[Form, Callable[[], Buffer | Pieces]]],
    header: Callable[[list[bytes]], bytes],
) -> None:
    """Write a whole container to an empty file.

    Hashing and writing run side by side in threads, beside ``load``; at most
    ``IN_FLIGHT`` tensors are held at a time.

    Args:
        fd: Descriptor open for writing.
        tensors: Name, dtype and shape of each tensor after the header, and a call
            that returns its bytes; called once, in order, in the calling thread.
        header: Given the digests of the tensors, returns the bytes of ``vkv.header``, of
            this build's version of the format. Called first with zeros, to learn the
            length, which must not depend on them.

    Raises:
        ContainerError: A tensor has another size than its form (C5), or the table
            is too large (C2).
        OSError: The file cannot be written.
    """
    blank = header([bytes(32)] * len(tensors))
    forms: list[Form] = [(HEADER, "U8", (len(blank),)), *(form for form, _ in tensors)]
    at = len(frame(VERSION, FileId("0" * 64), forms)) + len(blank)
    digests: list[Future[bytes]] = []
    with (
        ThreadPoolExecutor(WRITERS, "vkv-hash") as hashers,
        ThreadPoolExecutor(WRITERS, "vkv-write") as writers,
    ):
        for i, ((name, dtype, shape), load) in enumerate(tensors):
            if i >= IN_FLIGHT:
                digests[i - IN_FLIGHT].result()
            data = pieces(load())
            expected = prod(shape) * ITEMSIZE[dtype]
            if data.nbytes != expected:
                raise ContainerError(
                    f"{data.nbytes} bytes, expected {expected}", rule="C5", at=name
                )
            digests.append(writers.submit(_put, fd, data, at, hashers))
            at += data.nbytes
            del data
    full = header([future.result() for future in digests])
    if len(full) != len(blank):
        raise ContainerError("header changed its length with the digests", rule="C7", at=HEADER)
    write_all(fd, frame(VERSION, of_header(full), forms) + full, 0)


def pieces(data: Buffer | Pieces) -> Pieces:
    """Return ``data`` if it comes in pieces, or a buffer as its only piece."""
    return _Whole(data) if isinstance(data, Buffer) else data


class _Whole:
    """Yield a buffer as its only piece."""

    def __init__(self, data: Buffer):
        self._data = memoryview(data).cast("B")
        self.nbytes = len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        yield self._data


def _put(fd: int, data: Pieces, offset: int, hashers: ThreadPoolExecutor) -> bytes:
    """Write ``data`` from ``offset`` on, while another thread hashes it; return the digest."""
    state = blake3()
    for piece in data:
        if len(piece) < LEAST_SHARED:
            state.update(piece)
            write_all(fd, piece, offset)
        else:
            hashed = hashers.submit(state.update, piece)
            try:
                write_all(fd, piece, offset)
            finally:
                hashed.result()  # the piece is valid until the next is asked for
        offset += len(piece)
    return state.digest()
