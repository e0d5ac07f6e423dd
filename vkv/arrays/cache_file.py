"""Stored tensors to MLX arrays: reads, verifies and decodes, tensor by tensor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Self

import mlx.core as mx

from vkv.arrays.reader import Reader, reader
from vkv.codecs.protocol import DTYPES, Codec, Parts
from vkv.codecs.segment_check import check_rereads, fit
from vkv.errors import CodecError, HeaderError, VkvError
from vkv.format import file_id
from vkv.format.dependencies import (
    Dependency,
    FileResolver,
    SearchPath,
    default_resolver,
    resolver_for,
)
from vkv.format.document import Document, open_document
from vkv.format.file_id import FileId
from vkv.format.layers import segment_shape
from vkv.format.schema import Header, Segment, Tensor


class CacheFile:
    """An open document whose tensors can be decoded.

    Args:
        document: Closed with the file.
        verify: Check the digest of what is read.
        resolver: Locates the files that this one depends on; by default it looks in the
            folder of the document.
    """

    def __init__(
        self, document: Document, *, verify: bool = True, resolver: FileResolver | None = None
    ):
        self.document, self._verify = document, verify
        self._resolver = resolver or default_resolver(document)
        self._reader = reader(document, verify=verify)
        self._dependencies: dict[FileId, tuple[Dependency, Reader]] = {}
        self._settled = True
        _checked(document)

    @property
    def header(self) -> Header:
        return self.document.header

    def prefetch(self, names: Iterable[str]) -> None:
        """Start reading stored tensors in the background; ``array`` then waits for them."""
        for where, own in self._located(names):
            where.start(own)

    @contextlib.contextmanager
    def unsettled(self) -> Iterator[None]:
        """Within, raw tensors come before their digests are compared; at its end all are.

        Reading then runs beside hashing. What is decoded from codes is verified first.

        Raises:
            DigestError: At the end: bytes changed (D1).
        """
        self._settled = False
        try:
            yield
        finally:
            self._settled = True
        for where in (self._reader, *(r for _, r in self._dependencies.values())):
            where.settle()

    def array(self, name: str, *, wait: bool = True) -> mx.array:
        """One stored tensor as an array of its dtype and shape.

        Without ``wait`` and within ``unsettled`` its digest may be compared later.

        Raises:
            DigestError: The bytes changed (D1).
            HeaderError: MLX cannot hold it (H2).
            MissingFileError: It stands in a file that was not found (H12).
        """
        ((where, (own,)),) = self._located([name])
        return where.get(own, wait=wait or self._settled)

    def check(self, name: str) -> None:
        """Compare the digest of one stored tensor, wherever it is (D1)."""
        stored = self.header.tensors[name]
        if stored.file is None:
            self.document.check(name)
        else:
            other, _ = self._dependency(file_id.from_bytes(stored.file))
            other.document.check(other.name(stored, name))

    def _located(self, names: Iterable[str]) -> list[tuple[Reader, list[str]]]:
        """Stored tensors by the reader that has them, under their names there."""
        own: list[str] = []
        others: dict[FileId, list[str]] = {}
        for name in names:
            stored = self.header.tensors[name]
            if stored.file is None:
                own.append(name)
            else:
                key = file_id.from_bytes(stored.file)
                others.setdefault(key, []).append(self._dependency(key)[0].name(stored, name))
        readers = [(self._dependencies[key][1], there) for key, there in others.items()]
        return [(self._reader, own), *readers] if own else readers

    def _dependency(self, key: FileId) -> tuple[Dependency, Reader]:
        if key not in self._dependencies:
            document = self._resolver.open(key)
            dependency = Dependency(document, self.header)
            self._dependencies[key] = dependency, reader(document, verify=self._verify)
        return self._dependencies[key]

    def parts(self, segment: Segment, shape: tuple[int, ...]) -> tuple[Codec, Parts]:
        """The codec and the validated parts of a segment covering ``shape``.

        Raises:
            UnknownCodecError: This build lacks the codec (K1).
            CodecError: Parameters, forms or values are refused.
        """
        codec = fit(self.header, segment, shape)
        self.prefetch(segment.parts.values())
        wait = not codec.traits.verbatim  # what checks and decodes codes must be able to trust them
        parts = {part: self.array(name, wait=wait) for part, name in segment.parts.items()}
        if 0 not in shape:
            codec.validate(parts, shape)
        return codec, parts

    def decode_segment(self, tensor: Tensor, index: int, at: str) -> mx.array:
        """One segment of ``tensor``, in the tensor's dtype.

        Keys that were rotated back before encoding are returned so; ``vkv.caches``
        rotates them forward.

        Raises:
            VkvError: As ``parts``; the message starts with ``at``.
        """
        segment = tensor.segments[index]
        shape = segment_shape(tensor, segment)
        if tensor.dtype not in DTYPES:
            raise HeaderError(f"MLX has no dtype {tensor.dtype}", rule="H2", at=at)
        try:
            codec, parts = self.parts(segment, shape)
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
        for other, where in self._dependencies.values():
            where.close()
            other.document.close()
        self._dependencies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(document: Document) -> None:
    """What no single segment tells of a file; closes one that is refused."""
    try:
        check_rereads(document.header)
    except VkvError as exc:
        document.close()
        raise exc.within(document.name) from None


def open_file(
    target: str | os.PathLike[str] | bytes,
    *,
    verify: bool = True,
    search_paths: Iterable[SearchPath] | None = None,
    more: Iterable[SearchPath] = (),
) -> CacheFile:
    """Open a path, a URL, or bytes; ``search_paths`` as in ``vkv.load``. Raises as ``Document``.

    ``more`` are searched after ``search_paths``, or after the default.
    """
    document = open_document(target)
    return CacheFile(document, verify=verify, resolver=resolver_for(document, search_paths, more))
