"""Stored tensors to MLX arrays: reads, verifies and decodes, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Self

import mlx.core as mx

from vkv import codecs, header
from vkv.codecs.base import DTYPES, Codec, Parts, check_dtype, check_forms, memory
from vkv.document import Document, open_document
from vkv.errors import CodecError, HeaderError, VkvError
from vkv.header import ITEMSIZE, Segment, Tensor


@cache
def _readers() -> ThreadPoolExecutor:
    """Threads that read and hash; both let go of the interpreter."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vkv-read")


class CacheFile:
    """An open document whose tensors can be decoded.

    Args:
        document: Closed with the file.
        verify: Check the digest of what is read.
    """

    def __init__(self, document: Document, *, verify: bool = True):
        self.document, self._verify = document, verify
        self._reading: dict[str, Future[mx.array]] = {}

    @property
    def header(self) -> header.Header:
        return self.document.header

    def prefetch(self, names: Iterable[str]) -> None:
        """Start reading stored tensors in the background; ``array`` then waits for them."""
        new = [n for n in dict.fromkeys(names) if n not in self._reading]
        arrays = {name: self._allocate(name) for name in new}
        mx.async_eval(list(arrays.values()))  # type: ignore[no-untyped-call]
        for name, out in arrays.items():
            self._reading[name] = _readers().submit(self._fill, name, out)

    def array(self, name: str) -> mx.array:
        """One stored tensor as an array of its dtype and shape.

        Raises:
            DigestError: The bytes changed (D1).
            HeaderError: MLX has no such dtype (H2).
        """
        self.prefetch([name])
        return self._reading.pop(name).result()

    def _allocate(self, name: str) -> mx.array:
        entry = self.document.entries[name]
        if entry.dtype not in DTYPES:
            raise HeaderError(f"MLX has no dtype {entry.dtype}", rule="H2", at=name)
        if entry.shape and entry.shape[-1] * ITEMSIZE[entry.dtype] >= 1 << 31:
            raise HeaderError(
                f"rows of {entry.shape[-1]} values; MLX counts their bytes in 32 bits",
                rule="H2",
                at=name,
            )
        return mx.zeros(entry.shape, DTYPES[entry.dtype])

    def _fill(self, name: str, out: mx.array) -> mx.array:
        """Read into the array's own memory, so that nothing is held twice."""
        entry = self.document.entries[name]
        if entry.nbytes:
            view = memory(out)
            self.document.source.readinto(entry.start, view)
            if self._verify:
                self.document.verify(name, view)
        return out

    def parts(self, segment: Segment, shape: tuple[int, ...]) -> tuple[Codec, Parts]:
        """The codec and the validated parts of a segment covering ``shape``.

        Raises:
            UnknownCodecError: This build lacks the codec (K1).
            CodecError: Parameters, forms or values are refused.
        """
        codec = codecs.resolve(segment.codec, segment.version, segment.params)
        stored = self.header.tensors
        forms = {p: (stored[n].dtype, stored[n].shape) for p, n in segment.parts.items()}
        check_forms(codec.layout(shape), forms)
        self.prefetch(segment.parts.values())
        parts = {part: self.array(name) for part, name in segment.parts.items()}
        if 0 not in shape:
            codec.validate(parts, shape)
        return codec, parts

    def decode_segment(self, tensor: Tensor, index: int, at: str) -> mx.array:
        """One segment of ``tensor``, in the tensor's dtype.

        Keys that were rotated back before encoding are returned so; ``vkv.live``
        rotates them forward.

        Raises:
            VkvError: As ``parts``; the message starts with ``at``.
        """
        segment = tensor.segments[index]
        shape = header.segment_shape(tensor, segment)
        if tensor.dtype not in DTYPES:
            raise HeaderError(f"MLX has no dtype {tensor.dtype}", rule="H2", at=at)
        try:
            codec, parts = self.parts(segment, shape)
            check_dtype(codec.id, tensor.dtype)
        except VkvError as exc:
            raise exc.within(at) from None
        if 0 in shape:  # MLX's kernels are not made for it
            return mx.zeros(shape, DTYPES[tensor.dtype])
        out = codec.decode(parts, shape, DTYPES[tensor.dtype])
        if out.shape != shape:
            raise CodecError(f"decoded to {out.shape}, expected {shape}", rule="K4", at=at)
        return out

    def close(self) -> None:
        wait(self._reading.values())
        self._reading.clear()
        self.document.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(target: str | os.PathLike[str] | bytes, *, verify: bool = True) -> CacheFile:
    """Open a path, or bytes in memory. Raises as ``Document``."""
    return CacheFile(open_document(target), verify=verify)
