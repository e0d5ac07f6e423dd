"""Read stored tensors with ``mx.load``, from a file and on a CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import mlx.core as mx

from vkv.arrays.deferred import DeferredVerification
from vkv.arrays.readable import check_readable
from vkv.arrays.threads import threads
from vkv.codecs.protocol import DTYPES, NAMES, memory
from vkv.errors import ContainerError
from vkv.format.document import Document
from vkv.sources.local import FileSource

#: Streams that lazy loads are dealt out to; each faults pages in on a core of its own.
STREAMS = 2


class LoadReader:
    """Reads by ``mx.load`` on the open descriptor, whose framing was checked before.

    Args:
        document: Whose tensors are read.
        source: Its file.
        verify: Compare digests.
    """

    def __init__(self, document: Document, source: FileSource, verify: bool):
        self._document, self._source, self._verify = document, source, verify
        #: What ``mx.load`` gave for each stream: arrays that are not read yet, by name.
        self._lazy: list[dict[str, mx.array]] = []
        self._started: dict[str, mx.array] = {}
        self._turn = 0

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._started:
                check_readable(self._document, name)
                self._started[name] = self._array(name)
                with _readable(name):
                    mx.async_eval(self._started[name])  # type: ignore[no-untyped-call]

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        self.start([name])
        out = self._started.pop(name)
        for lazy in self._lazy:
            lazy.pop(name, None)
        with _readable(name):
            mx.eval(out)
        if self._verify:
            check = self._check(name, out)
            if deferred is None:
                check.result()
            else:
                deferred.add(check)
        return out

    def _check(self, name: str, x: mx.array) -> Future[None]:
        return threads().submit(self._document.verify, name, memory(x))

    def close(self) -> None:
        for out in self._started.values():
            # MLX reports a failed read at the stream's next use, by whoever that is.
            with contextlib.suppress(RuntimeError):
                mx.eval(out)
        self._started.clear()
        self._lazy.clear()

    def _array(self, name: str) -> mx.array:
        entry = self._document.entries[name]
        if entry.nbytes == 0:
            return mx.zeros(entry.shape, DTYPES[entry.dtype])
        if not self._lazy or name not in self._lazy[0]:  # first use, or read before
            self._lazy = [self._load(stream) for stream in _streams()]
        self._turn += 1
        x = self._lazy[self._turn % STREAMS].get(name)
        if x is None or (NAMES[x.dtype], x.shape) != (entry.dtype, entry.shape):
            raise ContainerError("changed after it was opened", rule="C1", at=name)
        return x

    def _load(self, stream: mx.Stream) -> dict[str, mx.array]:
        path = f"/dev/fd/{self._source.fileno()}"
        with _readable(self._source.path):
            arrays = mx.load(path, format="safetensors", stream=stream)
        assert isinstance(arrays, dict)
        return arrays


@contextlib.contextmanager
def _readable(at: str) -> Iterator[None]:
    """Turn an error of MLX into ours: the file was changed after it was opened (C1)."""
    try:
        yield
    except RuntimeError as exc:
        raise ContainerError(f"cannot be read: {exc}", rule="C1", at=at) from None


_local = threading.local()


def _streams() -> list[mx.Stream]:
    """Return this thread's streams, made once: MLX never ends the thread behind one."""
    if not hasattr(_local, "streams"):
        _local.streams = [mx.new_stream(mx.cpu) for _ in range(STREAMS)]
    streams: list[mx.Stream] = _local.streams
    return streams
