"""Read a local file by range."""

from __future__ import annotations

import os
import stat

from vkv.errors import ContainerError
from vkv.sources.base import READ_CHUNK


class FileSource:
    """A local file, held open, so that replacing its name does not change what is read.

    Args:
        path: A path, or the descriptor of an open file, which is left open.

    Raises:
        ContainerError: Not a regular file, or shorter than a range asked for (C1).
    """

    def __init__(self, path: str | os.PathLike[str] | int):
        self.path = f"<descriptor {path}>" if isinstance(path, int) else os.fspath(path)
        target = os.dup(path) if isinstance(path, int) else path
        self._file = open(target, "rb", buffering=0, opener=_open)  # noqa: SIM115  # see close()
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self._file.close()
            raise ContainerError("not a regular file", rule="C1", at=self.path)
        self.size = found.st_size

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, start: int, size: int) -> bytes:
        if start + size > self.size:  # before anything is allocated
            raise self._ends(self.size, start + size)
        buffer = bytearray(size)
        self.readinto(start, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                n = os.preadv(self._file.fileno(), [buffer[done : done + READ_CHUNK]], start + done)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, self.path) from exc
            if n == 0:
                raise self._ends(min(start + done, self.size), start + len(buffer))
            done += n

    def _ends(self, end: int, expected: int) -> ContainerError:
        text = f"ends at byte {end}, expected {expected}"
        return ContainerError(text, rule="C1", at=self.path)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if file := getattr(self, "_file", None):
            file.close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would wait for one
