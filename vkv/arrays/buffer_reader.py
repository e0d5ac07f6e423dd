"""Read stored tensors into the memory of arrays that exist already, on an NVIDIA GPU too."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import mlx.core as mx
from blake3 import blake3

from vkv.arrays import cuda
from vkv.arrays.deferred import DeferredVerification
from vkv.arrays.readable import check_readable
from vkv.arrays.threads import threads
from vkv.codecs.protocol import DTYPES, memory
from vkv.format.document import Document
from vkv.sources.local import FileSource
from vkv.sources.memory import BytesSource

#: Ranges asked for at once over a network, where threads wait and do not compute.
REQUESTS = 16


class BufferReader:
    """Reads from any source, in threads that compare digests too.

    Args:
        document: Whose tensors are read.
        verify: Compare digests.
    """

    def __init__(self, document: Document, verify: bool):
        self._document, self._verify = document, verify
        self._gpu = cuda.device()
        local = isinstance(document.source, FileSource | BytesSource)
        self._threads = threads() if local else threads(REQUESTS)
        self._started: dict[str, Future[mx.array]] = {}

    def start(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._started]
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

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        """Return one stored tensor; its digest was compared by the thread that read it."""
        self.start([name])
        entry, flat = self._document.entries[name], self._started.pop(name).result()
        out = flat.view(DTYPES[entry.dtype]).reshape(entry.shape)
        mx.eval(out)
        return out

    def close(self) -> None:
        wait_for(self._started.values())
        self._started.clear()

    def _fill(self, name: str, out: mx.array) -> mx.array:
        view = memory(out) if out.nbytes else memoryview(bytearray())
        self._document.source.readinto(self._document.entries[name].start, view)
        if self._verify:
            self._document.verify(name, view)
        return out

    def _upload(self, gpu: cuda.Device, name: str, out: mx.array, address: int) -> mx.array:
        """Fill an array on a GPU, by way of page-locked memory."""
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
