"""Remember which stored layer a cache was loaded from, so that saving it again loses nothing.

A cache decoded from lossy codes and then saved would be quantized twice. A loaded cache
therefore carries a ``Provenance``: the path of the file and the layer there, no open file.
When the cache is saved the file is opened again, each leading segment whose decoded values
are still in the cache, bit for bit, is copied as it is, and only what follows is encoded.
So another file at that path does no harm: what is copied decodes to what the cache holds.
Where a cache was cut inside a segment, the codes in front of the cut are kept as far as the
codec can cut: at a window, for a codec that has windows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile, open_file
from vkv.caches.encoded import EncodedRun
from vkv.caches.loading.decode import decode_segment
from vkv.codecs import registry
from vkv.codecs.protocol import NAMES
from vkv.errors import VkvError
from vkv.format.dependencies import FileResolver, SearchPath
from vkv.format.file_id import FileId
from vkv.format.layers import stored_layers
from vkv.format.schema import Layer, Tensor
from vkv.sources.urls import is_url

_ATTRIBUTE = "vkv_provenance"


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file that caches were loaded from.

    Attributes:
        path: Absolute, or a URL.
        id: Its id at that time.
        search_paths: Where the files are found that it depends on, absolute or URLs.
    """

    path: str
    id: FileId
    search_paths: tuple[str, ...]

    def open(self) -> CacheFile:
        """Open what is at the path now, or the file with the id in the search paths.

        Raises:
            VkvError: Neither is there, or it is damaged.
            OSError: The file at the path cannot be read, and no other has the id.
        """
        try:
            return open_file(self.path, search_paths=self.search_paths)
        except OSError as exc:
            try:
                document = FileResolver(self.search_paths).open(self.id)
            except VkvError:
                raise exc from None
            return CacheFile(document, resolver=FileResolver(self.search_paths))


@dataclass(frozen=True, slots=True)
class Provenance:
    """The stored layer that a cache was loaded from; copies and pickles of the cache keep it.

    Attributes:
        file: The file.
        at: Path of the layer in it, ``layers[3].children[0]``.
    """

    file: LoadedFile
    at: str


#: Files that caches were loaded from, opened again for one save.
OpenFiles = Mapping[LoadedFile, CacheFile]


def loaded_file(file: CacheFile) -> LoadedFile | None:
    """Return what is remembered of an open file; ``None`` if it is in memory alone."""
    name = file.document.name
    if not is_url(name) and not os.path.isfile(name):
        return None
    paths = tuple(map(_absolute, file.search_paths))
    return LoadedFile(_absolute(name), file.document.id, paths)


def _absolute(path: SearchPath) -> str:
    text = os.fspath(path)
    return text if is_url(text) else os.path.abspath(text)


@contextmanager
def reopened(provenances: Iterable[Provenance]) -> Iterator[OpenFiles]:
    """Open the files that caches were loaded from, until the block exits.

    Warns:
        UserWarning: One is gone or damaged: what was decoded from it is encoded anew.
    """
    with ExitStack() as stack:
        files: dict[LoadedFile, CacheFile] = {}
        for file in dict.fromkeys(provenance.file for provenance in provenances):
            try:
                files[file] = stack.enter_context(file.open())
            except (VkvError, OSError) as exc:
                warnings.warn(
                    f"{file.path}, which the caches were loaded from, cannot be read ({exc}): its "
                    "codes cannot be kept, what was decoded from them is encoded anew",
                    UserWarning,
                    stacklevel=4,
                )
        yield files


def stored_layer(files: OpenFiles, provenance: Provenance | None) -> StoredLayer | None:
    """Return the layer that a cache came from, if its file is open and has it."""
    file = None if provenance is None else files.get(provenance.file)
    if provenance is None or file is None:
        return None
    layer = dict(stored_layers(file.header)).get(provenance.at)
    return None if layer is None else StoredLayer(file, layer, provenance.at)


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer of an open file, compared with a live cache."""

    file: CacheFile
    layer: Layer
    at: str

    def runs(self, name: str, x: mx.array, first: int = 0) -> list[EncodedRun]:
        """Return the segments of a tensor, from row ``first`` on, that still decode to ``x``.

        Lossless segments but sinks before codes are left out: nothing is lost by encoding
        them anew.

        Args:
            name: ``"keys"`` or ``"values"``.
            x: The live tensor, ``(B, H, T, D)``.
            first: Row at which a segment must start; rows before it are stored otherwise.
        """
        tensor = self.layer.tensors.get(name)
        if tensor is None or not _same_form(tensor, x):
            return []
        runs: list[EncodedRun] = []
        start = 0
        for i, segment in enumerate(tensor.segments):
            tokens = segment.tokens or tensor.shape[-2]
            if start >= first:
                run = self._readable(name, tensor, i, x, start)
                runs += [] if run is None else [run]
                if run is None or run.tokens < tokens or start + tokens == x.shape[-2]:
                    break
            start += tokens
            if start > first and not runs:
                break  # no segment starts at ``first``
        while runs and runs[-1].codec.traits.lossless:
            runs.pop()
        return runs

    def _readable(
        self, name: str, tensor: Tensor, index: int, x: mx.array, start: int
    ) -> EncodedRun | None:
        """Return what ``_matching`` does; nothing, and a warning, if it cannot be read."""
        try:
            return self._matching(name, tensor, index, x, start)
        except (VkvError, OSError) as exc:
            warnings.warn(
                f"codes of {self.file.document.name} cannot be kept ({exc}): what was decoded "
                "from them is encoded anew",
                UserWarning,
                stacklevel=2,
            )
            return None

    def _matching(
        self, name: str, tensor: Tensor, index: int, x: mx.array, start: int
    ) -> EncodedRun | None:
        """Return segment ``index``, or as much of its front as is in ``x`` from ``start`` on."""
        segment = tensor.segments[index]
        sink = "sink" in {self.file.header.tensors[p].role for p in segment.parts.values()}
        if segment.tokens is None or (registry.is_lossless(segment) and not sink):
            return None
        run, decoded = decode_segment(self.file, self.layer, name, index, start, self.at)
        tokens = min(segment.tokens, x.shape[-2] - start)
        tokens = _equal_tokens(decoded[..., :tokens, :], x[..., start : start + tokens, :])
        return run.prefix(tensor.shape, tokens)


def attach(cache: Any, provenance: Provenance) -> None:
    """Remember where ``cache`` came from."""
    setattr(cache, _ATTRIBUTE, provenance)


def of(cache: Any) -> Provenance | None:
    """Return where ``cache`` came from, if it was loaded."""
    known = getattr(cache, _ATTRIBUTE, None)
    return known if isinstance(known, Provenance) else None


def _same_form(tensor: Tensor, x: mx.array) -> bool:
    return (
        x.ndim == len(tensor.shape)
        and NAMES.get(x.dtype) == tensor.dtype
        and (*x.shape[:-2], x.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
    )


def _equal_tokens(a: mx.array, b: mx.array) -> int:
    """Count the leading tokens of ``a`` and ``b`` that are equal in every head and channel."""
    if a.shape[-2] == 0:
        return 0
    same = (a == b) | ((a != a) & (b != b))
    axes = tuple(i for i in range(a.ndim) if i != a.ndim - 2)
    first = mx.cumprod(same.all(axis=axes).astype(mx.int32))
    return int(first.sum().item())  # type: ignore[arg-type]  # never complex
