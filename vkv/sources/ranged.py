"""Read an object behind a URL by range, its first bytes once."""

from __future__ import annotations

from vkv.errors import ContainerError
from vkv.sources.base import READ_CHUNK


class RangedSource:
    """Ranged reads with the first bytes kept: enough for JSON and header of most files.

    Attributes:
        size: Bytes of the object, as the server said when it was opened.
    """

    size: int

    def __init__(self, url: str):
        self.url = url
        self._head = b""

    def read(self, start: int, size: int) -> bytes:
        if start + size > self.size:  # before anything is allocated
            raise ContainerError(f"ends at byte {self.size}, expected {start + size}", rule="C1")
        buffer = bytearray(size)
        self.readinto(start, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, start: int, buffer: memoryview) -> None:
        if start + len(buffer) <= len(self._head):
            buffer[:] = self._head[start : start + len(buffer)]
            return
        for at in range(0, len(buffer), READ_CHUNK):
            self._fetch(start + at, buffer[at : at + READ_CHUNK])

    def _fetch(self, start: int, buffer: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Connections belong to fsspec, which keeps them for the next file."""
