"""Choose how stored tensors are read into MLX arrays.

There are two ways to the same bytes. ``mx.load`` allocates without clearing and faults
pages in while it reads: the fastest way for a file on a CPU, with two streams more so.
On a GPU, from memory and over a network, threads read into arrays that exist already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

import mlx.core as mx

from vkv.arrays.buffer_reader import BufferReader
from vkv.arrays.deferred import DeferredVerification
from vkv.arrays.load_reader import LoadReader
from vkv.format.document import Document
from vkv.sources.local import FileSource


class Reader(Protocol):
    """Reads stored tensors of one document, each of them once."""

    def start(self, names: Iterable[str]) -> None:
        """Begin to read; ``get`` waits."""

    def get(self, name: str, deferred: DeferredVerification | None = None) -> mx.array:
        """Return one stored tensor, evaluated.

        Args:
            name: Its name in the document.
            deferred: Takes the check of its digest; without it, the digest is compared now.

        Raises:
            DigestError: The bytes changed (D1).
        """

    def close(self) -> None:
        """Wait for what was started and forget it."""


def reader(document: Document, *, verify: bool) -> Reader:
    """Return the reader that suits the document and the device."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu and isinstance(document.source, FileSource) and os.path.exists("/dev/fd"):
        return LoadReader(document, document.source, verify)
    return BufferReader(document, verify)
