"""Stored tensors to MLX arrays: reads, verifies and decodes, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Self

import mlx.core as mx

from vkv import codecs, header
from vkv.codecs.base import DTYPES, Codec, Parts, check_dtype, check_forms
from vkv.document import Document, open_document
from vkv.errors import CodecError, HeaderError, VkvError
from vkv.header import Segment, Tensor
from vkv.reader import reader


class CacheFile:
    """An open document whose tensors can be decoded.

    Args:
        document: Closed with the file.
        verify: Check the digest of what is read.
    """

    def __init__(self, document: Document, *, verify: bool = True):
        self.document = document
        self._reader = reader(document, verify=verify)

    @property
    def header(self) -> header.Header:
        return self.document.header

    def prefetch(self, names: Iterable[str]) -> None:
        """Start reading stored tensors in the background; ``array`` then waits for them."""
        self._reader.start(names)

    def array(self, name: str) -> mx.array:
        """One stored tensor as an array of its dtype and shape.

        Raises:
            DigestError: The bytes changed (D1).
            HeaderError: MLX cannot hold it (H2).
        """
        return self._reader.get(name)

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
        self._reader.close()
        self.document.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(target: str | os.PathLike[str] | bytes, *, verify: bool = True) -> CacheFile:
    """Open a path, or bytes in memory. Raises as ``Document``."""
    return CacheFile(open_document(target), verify=verify)
