"""Stored tensors into MLX arrays, read ahead, verified, never held twice.

Two ways to the same bytes. MLX's own lazy load allocates without clearing and
faults pages in while it reads: on a CPU the fastest way, two streams more so. On
a GPU, from memory and over a network, threads read into arrays already there, on
an NVIDIA GPU by way of page-locked memory (``vkv.arrays.cuda``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import cache
from typing import Protocol

import mlx.core as mx
from blake3 import blake3

from vkv.arrays import cuda
from vkv.arrays.deferred import DeferredVerification
from vkv.codecs.protocol import DTYPES, NAMES, memory
from vkv.errors import ContainerError, HeaderError
from vkv.format.document import Document
from vkv.format.dtypes import ITEMSIZE
from vkv.sources.local import FileSource
from vkv.sources.memory import BytesSource

#: Lazy loads are dealt out to as many streams; each faults pages in on a core of its own.
STREAMS = 2


class Reader(Protocol):
    """Reads stored tensors of one document."""

    def start(self, names: Iterable[str]) -> None:
        """Begin to read; ``get`` waits."""

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        """Return one stored tensor, evaluated and, if asked for, verified (D1).

        With ``deferred`` its digest may be compared later.
        """

    def close(self) -> None:
        """Let go of what was started."""


def reader(document: Document, *, verify: bool) -> Reader:
    """The reader that suits the document and the device."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu and isinstance(document.source, FileSource) and os.path.exists("/dev/fd"):
        return LazyReader(document, document.source, verify)
    return ThreadReader(document, verify)


def check_readable(document: Document, name: str) -> None:
    """Refuse what MLX cannot hold (H2)."""
    entry = document.entries[name]
    if entry.dtype not in DTYPES:
        raise HeaderError(f"MLX has no dtype {entry.dtype}", rule="H2", at=name)
    if entry.shape and entry.shape[-1] * ITEMSIZE[entry.dtype] >= 1 << 31:
        raise HeaderError(
            f"rows of {entry.shape[-1]} values; MLX counts their bytes in 32 bits",
            rule="H2",
            at=name,
        )


class LazyReader:
    """``mx.load`` on the open descriptor; framing was checked before."""

    def __init__(self, document: Document, source: FileSource, verify: bool):
        self._document, self._source, self._verify = document, source, verify
        self._tables: list[dict[str, mx.array]] = []
        self._started: dict[str, mx.array] = {}
        #: Tables may be read for many segments; anything else is read once.
        self._held: dict[str, mx.array] = {}
        self._turn = 0

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._started and name not in self._held:
                check_readable(self._document, name)
                self._started[name] = self._array(name)
                with _readable(name):
                    mx.async_eval(self._started[name])  # type: ignore[no-untyped-call]

    def _array(self, name: str) -> mx.array:
        entry = self._document.entries[name]
        if entry.nbytes == 0:
            return mx.zeros(entry.shape, DTYPES[entry.dtype])
        if not self._tables or name not in self._tables[0]:  # new, or read before and let go
            self._tables = [self._table(stream) for stream in _streams()]
        self._turn += 1
        found = self._tables[self._turn % STREAMS].get(name)
        if found is None or (NAMES[found.dtype], found.shape) != (entry.dtype, entry.shape):
            raise ContainerError("changed after it was opened", rule="C1", at=name)
        return found

    def _table(self, stream: mx.Stream) -> dict[str, mx.array]:
        path = f"/dev/fd/{self._source.fileno()}"
        with _readable(self._source.path):
            found = mx.load(path, format="safetensors", stream=stream)
        assert isinstance(found, dict)
        return found

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        if name in self._held:
            return self._held[name]
        self.start([name])
        out = self._started.pop(name)
        for table in self._tables:
            table.pop(name, None)
        with _readable(name):
            mx.eval(out)
        if self._verify:
            self._check(name, out, deferred)
        if self._document.header.tensors[name].role == "table":
            self._held[name] = out
        return out

    def _check(self, name: str, out: mx.array, deferred: DeferredVerification | None) -> None:
        check = _threads().submit(self._document.verify, name, memory(out))
        if deferred is None:
            check.result()
        else:
            deferred.add(check)

    def close(self) -> None:
        for out in self._started.values():
            # MLX tells of a failed read at the stream's next turn, whoever's that is.
            with contextlib.suppress(RuntimeError):
                mx.eval(out)
        self._started.clear()
        self._tables.clear()


@contextlib.contextmanager
def _readable(at: str) -> Iterator[None]:
    """MLX's error as ours: the file was changed after it was opened (C1)."""
    try:
        yield
    except RuntimeError as exc:
        raise ContainerError(f"cannot be read: {exc}", rule="C1", at=at) from None


_local = threading.local()


def _streams() -> list[mx.Stream]:
    """This thread's streams, made once: MLX never ends the thread behind one."""
    if not hasattr(_local, "streams"):
        _local.streams = [mx.new_stream(mx.cpu) for _ in range(STREAMS)]
    streams: list[mx.Stream] = _local.streams
    return streams


#: Threads that read and hash.
HASHERS = min(16, os.cpu_count() or 1)
#: Ranges asked for at once over a network, where they wait and do not compute.
REQUESTS = 16


@cache
def _threads(count: int = HASHERS) -> ThreadPoolExecutor:
    """Threads that read and hash; both let go of the interpreter."""
    return ThreadPoolExecutor(count, "vkv-read")


class ThreadReader:
    """Reads into the memory of arrays that are there already, on an NVIDIA GPU too."""

    def __init__(self, document: Document, verify: bool):
        self._document, self._verify = document, verify
        self._gpu = cuda.device()
        here = isinstance(document.source, FileSource | BytesSource)
        self._threads = _threads() if here else _threads(REQUESTS)
        self._started: dict[str, Future[mx.array]] = {}
        self._held: dict[str, mx.array] = {}

    def start(self, names: Iterable[str]) -> None:
        new = [n for n in dict.fromkeys(names) if n not in self._started and n not in self._held]
        for name in new:
            check_readable(self._document, name)
        flat = [mx.zeros(self._document.entries[name].nbytes, mx.uint8) for name in new]
        mx.async_eval(flat)  # type: ignore[no-untyped-call]
        for name, out in zip(new, flat, strict=True):
            if self._gpu is None or out.nbytes < cuda.LEAST:
                self._started[name] = self._threads.submit(self._fill, name, out)
            else:
                at = self._gpu.address(out)
                self._started[name] = self._threads.submit(self._upload, self._gpu, name, out, at)

    def _fill(self, name: str, out: mx.array) -> mx.array:
        view = memory(out) if out.nbytes else memoryview(bytearray())
        self._document.source.readinto(self._document.entries[name].start, view)
        if self._verify:
            self._document.verify(name, view)
        return out

    def _upload(self, gpu: cuda.Device, name: str, out: mx.array, address: int) -> mx.array:
        """As ``_fill``, by way of page-locked memory."""
        entry, state = self._document.entries[name], blake3()
        with gpu.stage() as stage:
            for at in range(0, entry.nbytes, cuda.STAGE):
                piece = stage.view[: min(cuda.STAGE, entry.nbytes - at)]
                self._document.source.readinto(entry.start + at, piece)
                if self._verify:
                    state.update(piece)
                gpu.to_device(address + at, stage, len(piece))
        if self._verify:
            self._document.compare(name, state.digest())
        return out

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        if name in self._held:
            return self._held[name]
        self.start([name])
        entry, flat = self._document.entries[name], self._started.pop(name).result()
        out = flat.view(DTYPES[entry.dtype]).reshape(entry.shape)
        mx.eval(out)
        if self._document.header.tensors[name].role == "table":
            self._held[name] = out
        return out

    def close(self) -> None:
        wait_for(self._started.values())
        self._started.clear()
