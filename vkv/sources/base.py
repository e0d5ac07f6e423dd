"""Define what a source of bytes offers: reads by range.

A source is a local file, bytes in memory, or an object behind a URL.
"""

from __future__ import annotations

from typing import Protocol

#: Bytes asked for at once when a file is opened: enough for JSON and header of most.
FIRST_READ = 1 << 16
#: Most bytes that one read or write of the operating system is asked for.
READ_CHUNK = 1 << 24

Buffer = bytes | bytearray | memoryview


class Source(Protocol):
    """Bytes that can be read by range: a file, or an object behind a URL."""

    size: int

    def read(self, start: int, size: int) -> bytes: ...

    def readinto(self, start: int, buffer: memoryview) -> None: ...

    def close(self) -> None: ...
