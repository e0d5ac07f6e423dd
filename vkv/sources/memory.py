"""Read bytes in memory by range."""

from __future__ import annotations

from vkv.errors import ContainerError
from vkv.sources.base import Buffer


class BytesSource:
    """Bytes in memory, as a source.

    Raises:
        ContainerError: Shorter than a range asked for (C1).
    """

    def __init__(self, data: Buffer):
        self._data = memoryview(data).cast("B")
        self.size = len(self._data)

    def read(self, start: int, size: int) -> bytes:
        if start + size > self.size:
            raise ContainerError(f"ends at byte {self.size}, expected {start + size}", rule="C1")
        return bytes(self._data[start : start + size])

    def readinto(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read(start, len(buffer))

    def close(self) -> None:
        self._data.release()
