"""Read, verify and decode stored tensors, one by one, to MLX arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Self

import mlx.core as mx

from vkv.arrays.deferred import DeferredVerification
from vkv.arrays.reader import Reader, reader
from vkv.codecs.protocol import DTYPES, Codec, Parts
from vkv.codecs.segment_check import check_rereads, fit
from vkv.errors import CodecError, DigestError, HeaderError, VkvError
from vkv.format import file_id
from vkv.format.dependencies import (
    Dependency,
    FileResolver,
    SearchPath,
    default_resolver,
    open_sound,
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
        #: Tables by file (``None``: this one) and name there. Many segments may share one;
        #: anything else is read once.
        self._tables: dict[tuple[FileId | None, str], mx.array] = {}
        _check_rereads(document)

    @property
    def header(self) -> Header:
        return self.document.header

    @property
    def search_paths(self) -> Sequence[SearchPath]:
        """Files and folders where its dependencies are looked for."""
        return self._resolver.search_paths

    def prefetch(self, names: Iterable[str]) -> None:
        """Start reading stored tensors in the background; ``array`` then waits for them."""
        by_file: dict[FileId | None, list[str]] = {}
        for name in names:
            file, there = self._locate(name)
            if (file, there) not in self._tables:
                by_file.setdefault(file, []).append(there)
        for file, wanted in by_file.items():
            self._reader_of(file).start(wanted)

    def array(self, name: str, *, deferred: DeferredVerification | None = None) -> mx.array:
        """Return one stored tensor as an array of its dtype and shape.

        Args:
            name: Of the stored tensor.
            deferred: Compares the digest later; without it, it is compared before.

        Raises:
            DigestError: The bytes changed (D1).
            HeaderError: MLX cannot hold it (H2).
            MissingFileError: It is in a file that was not found (H12).
        """
        file, there = key = self._locate(name)
        if key in self._tables:
            return self._tables[key]
        x = self._reader.get(there, deferred) if file is None else self._external(file, name)
        if self.header.tensors[name].role == "table":
            self._tables[key] = x
        return x

    def _external(self, file: FileId, name: str) -> mx.array:
        """Return a stored tensor of another file, of a sound copy if the first is damaged.

        Its digest is compared at once: later it would be too late for another copy.
        """
        try:
            return self._reader_of(file).get(self._locate(name)[1])
        except DigestError:
            self._replace(file)
        return self._reader_of(file).get(self._locate(name)[1])

    def _replace(self, file: FileId) -> None:
        """Close a damaged dependency and open a sound copy in its place."""
        dependency, its_reader = self._dependencies.pop(file)
        its_reader.close()
        dependency.document.close()
        self._attach(file, open_sound(self._resolver, file, self.header))

    def check(self, name: str) -> None:
        """Compare the digest of one stored tensor, wherever it is (D1)."""
        file, there = self._locate(name)
        if file is None:
            return self.document.check(there)
        try:
            self._dependency(file)[0].document.check(there)
        except DigestError:
            self._replace(file)

    def _locate(self, name: str) -> tuple[FileId | None, str]:
        """Return the file that holds a stored tensor (``None``: this one), and its name there."""
        stored = self.header.tensors[name]
        if stored.file is None:
            return None, name
        file = file_id.from_bytes(stored.file)
        return file, self._dependency(file)[0].name(stored, name)

    def _reader_of(self, file: FileId | None) -> Reader:
        return self._reader if file is None else self._dependency(file)[1]

    def _dependency(self, key: FileId) -> tuple[Dependency, Reader]:
        if key not in self._dependencies:
            self._attach(key, Dependency(self._resolver.open(key), self.header))
        return self._dependencies[key]

    def _attach(self, key: FileId, dependency: Dependency) -> None:
        self._dependencies[key] = dependency, reader(dependency.document, verify=self._verify)

    def parts(
        self,
        segment: Segment,
        shape: tuple[int, ...],
        *,
        deferred: DeferredVerification | None = None,
        decoded: bool = False,
    ) -> tuple[Codec, Parts]:
        """Return the codec and the validated parts of a segment covering ``shape``.

        Args:
            segment: One of the header's.
            shape: Covered.
            deferred: Compares the digest of what is stored verbatim later; codes are
                verified before they are checked.
            decoded: The caller decodes the parts at once. A codec that checks all while it
                decodes is then not asked to validate them first, which would take as long.

        Raises:
            UnknownCodecError: This build lacks the codec (K1).
            CodecError: Parameters, forms or values are refused.
        """
        codec = fit(self.header, segment, shape)
        self.prefetch(segment.parts.values())
        later = deferred if codec.traits.verbatim else None
        parts = {part: self.array(name, deferred=later) for part, name in segment.parts.items()}
        if 0 not in shape and not (decoded and codec.traits.decode_validates):
            codec.validate(parts, shape)
        return codec, parts

    def decode_segment(
        self, tensor: Tensor, index: int, at: str, *, deferred: DeferredVerification | None = None
    ) -> tuple[Codec, Parts, mx.array]:
        """Read one segment of ``tensor`` and decode it, in the tensor's dtype.

        Keys whose rope was undone before encoding are returned so; ``vkv.caches``
        rotates them forward.

        Returns:
            The codec, the parts, and what they decode to.

        Raises:
            VkvError: As ``parts``; the message starts with ``at``.
        """
        segment = tensor.segments[index]
        shape = segment_shape(tensor, segment)
        if tensor.dtype not in DTYPES:
            raise HeaderError(f"MLX has no dtype {tensor.dtype}", rule="H2", at=at)
        try:
            codec, parts = self.parts(segment, shape, deferred=deferred, decoded=True)
            # MLX's kernels are not made for no elements
            empty = mx.zeros(shape, DTYPES[tensor.dtype]) if 0 in shape else None
            out = codec.decode(parts, shape, DTYPES[tensor.dtype]) if empty is None else empty
        except DigestError:  # it says the name of the stored tensor, which has the path
            raise
        except VkvError as exc:
            raise exc.within(at) from None
        if out.shape != shape:
            raise CodecError(f"decoded to {out.shape}, expected {shape}", rule="K4", at=at)
        return codec, parts, out

    def close(self) -> None:
        self._reader.close()
        self.document.close()
        for dependency, its_reader in self._dependencies.values():
            its_reader.close()
            dependency.document.close()
        self._dependencies.clear()
        self._tables.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_rereads(document: Document) -> None:
    """Refuse a file whose expensive parts are read over and over (T23), and close it."""
    try:
        check_rereads(document.header)
    except VkvError as exc:
        document.close()
        raise exc.of_file(document.name) from None


def open_file(
    target: str | os.PathLike[str] | bytes,
    *,
    verify: bool = True,
    search_paths: Iterable[SearchPath] | None = None,
    more: Iterable[SearchPath] = (),
) -> CacheFile:
    """Open a file whose tensors can be decoded.

    Args:
        target: A path, a URL, or the bytes of a file.
        verify: Check the digest of what is read.
        search_paths: Files and folders where dependencies are looked for; the file's own
            folder if not given.
        more: Searched after these.

    Raises:
        VkvError: As ``Document``, or expensive parts would be read over and over (T23).
        OSError: The file cannot be opened.
    """
    document = open_document(target)
    return CacheFile(document, verify=verify, resolver=resolver_for(document, search_paths, more))
