"""Read the layers of a file before they are decoded, and tell how far it is."""

from __future__ import annotations

from vkv.arrays.cache_file import CacheFile
from vkv.arrays.threads import HASHERS
from vkv.caches.saving.request import Progress
from vkv.format.layers import stored_layers, walk
from vkv.format.schema import Layer

#: Bytes read ahead of the layer that is decoded: enough to keep two streams of reads busy.
BYTES_AHEAD = 1 << 27
#: ... and tensors: each is read and hashed by one thread.
TENSORS_AHEAD = 2 * HASHERS


class ReadAhead:
    """Start reading layers before they are asked for, so many bytes and tensors ahead."""

    def __init__(self, file: CacheFile):
        self._file = file
        self._names = [stored_names(layer) for layer in file.header.layers]
        self._started = self._bytes = self._tensors = 0

    def reach(self, index: int) -> None:
        """Note that layer ``index`` is decoded now; the one behind it is read whatever its size."""
        if index:
            self._count(index - 1, -1)
        while self._started < len(self._names) and self._wanted(index):
            self._file.prefetch(self._names[self._started])
            self._count(self._started, 1)
            self._started += 1

    def _wanted(self, index: int) -> bool:
        few = self._bytes < BYTES_AHEAD or self._tensors < TENSORS_AHEAD
        return few or self._started < index + 2

    def _count(self, index: int, sign: int) -> None:
        names = self._names[index]
        self._tensors += sign * len(names)
        self._bytes += sign * sum(self._file.header.tensors[name].nbytes for name in names)


class LayerProgress:
    """Report the stored bytes of finished layers, those of checkpoints among them."""

    def __init__(self, file: CacheFile, report: Progress | None):
        self._report, self._done = report, 0
        names = {name for _, layer in stored_layers(file.header) for name in stored_names(layer)}
        self._left = {name: file.header.tensors[name].nbytes for name in names}
        self._total = sum(self._left.values())

    def finished(self, layer: Layer) -> None:
        """Count a layer and its children; a tensor that several share counts once."""
        if self._report is None:
            return
        self._done += sum(self._left.pop(name, 0) for name in stored_names(layer))
        self._report(self._done, self._total)


def stored_names(layer: Layer) -> set[str]:
    """Return the names of the stored tensors of a layer and of its children."""
    return {
        name
        for _, inner in walk((layer,))
        for tensor in inner.tensors.values()
        for segment in tensor.segments
        for name in segment.parts.values()
    }
