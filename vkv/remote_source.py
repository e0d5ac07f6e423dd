"""Bytes behind a URL, read by range: http(s), s3, gs, hf and what else fsspec knows.

fsspec is imported when a URL is opened and not before; credentials and proxies
come from the environment and the configuration that fsspec reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vkv.container import CHUNK, FIRST_READ, Source
from vkv.errors import ContainerError, VkvError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: ``s3://…``; two letters at least, so that ``C:`` is none; ``simplecache::s3://…`` is a chain.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::)")
_SECRET = re.compile(r"(?<=://)[^/@?#]*@|[?#].*$", re.DOTALL)

#: Characters of what a back end says that a message has.
MAX_REASON = 200
INSTALL = "pip install 'vkv[remote]'"


def is_url(target: object) -> bool:
    """Whether ``target`` is text that begins like a URL."""
    return isinstance(target, str) and _URL.match(target) is not None


def shown(url: str) -> str:
    """``url`` without what may be secret: user, password, and a query (signed URLs)."""
    return _SECRET.sub("", url)


def open_source(url: str) -> Source:
    """The bytes behind ``url``.

    Raises:
        OSError: Not found, not allowed, not reached, or neither ranged reads nor small.
        VkvError: A package is missing, or the scheme is unknown.
    """
    files, path = filesystem(url)
    if url.lower().startswith(("http://", "https://")):
        from vkv.http_source import http_source

        return http_source(files, url)
    return ObjectSource(files, path, url)


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """fsspec's file system behind ``url``, and the path in it.

    Listings are not cached: other machines write there too.

    Raises:
        OSError: It cannot be reached.
        VkvError: A package is missing, or the scheme is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise VkvError(f"a URL needs the package fsspec: {INSTALL}", at=shown(url)) from None
    with naming(url):
        files, path = url_to_fs(url, use_listings_cache=False)
    return files, path


class RangedSource:
    """Ranged reads with the first bytes kept: enough for JSON and header of most files.

    Attributes:
        size: Bytes of the object, as the server told when it was opened.
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
        for at in range(0, len(buffer), CHUNK):
            self._fetch(start + at, buffer[at : at + CHUNK])

    def _fetch(self, start: int, buffer: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Connections belong to fsspec, which keeps them for the next file."""


class ObjectSource(RangedSource):
    """An object of any file system of fsspec."""

    def __init__(self, files: AbstractFileSystem, path: str, url: str):
        super().__init__(url)
        self._files, self._path = files, path
        with naming(url):
            info = files.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), shown(url))
        if info["size"] is None:
            raise OSError(errno.EIO, "the server does not tell its size", shown(url))
        self.size = int(info["size"])
        self._head = self.read(0, min(self.size, FIRST_READ))

    def _fetch(self, start: int, buffer: memoryview) -> None:
        with naming(self.url):
            data = self._files.cat_file(self._path, start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise ContainerError(
                f"ends at byte {start + len(data)}, expected {start + len(buffer)}", rule="C1"
            )
        buffer[:] = data


@contextlib.contextmanager
def naming(url: str) -> Iterator[None]:
    """Whatever fsspec and its back ends raise becomes one line that names ``url``.

    Raises:
        OSError: Of the class that fits, with ``filename`` the URL.
        VkvError: A package is missing, or the scheme is unknown.
    """
    try:
        yield
    except VkvError:
        raise
    except ImportError as exc:
        raise VkvError(f"a package is missing ({_line(exc)}): {INSTALL}", at=shown(url)) from None
    except ValueError as exc:  # "Protocol not known: x"
        raise VkvError(_line(exc), at=shown(url)) from None
    except Exception as exc:
        number, reason = _reason(exc)
        raise OSError(number, _one_line(reason), shown(url)) from exc


#: By the name of the class, so that no back end is imported to look for it.
_WORDS = {
    "FileNotFoundError": (errno.ENOENT, "not found"),
    "RepositoryNotFoundError": (errno.ENOENT, "no such repository"),
    "GatedRepoError": (errno.EACCES, "its authors ask to be asked for access"),
    "PermissionError": (errno.EACCES, "access denied"),
    "NoCredentialsError": (errno.EACCES, "no credentials in the environment"),
    "TimeoutError": (errno.ETIMEDOUT, "no answer in time"),
    "ServerDisconnectedError": (errno.ECONNRESET, "the connection was cut"),
    "ClientPayloadError": (errno.ECONNRESET, "the connection was cut"),
    "ConnectionResetError": (errno.ECONNRESET, "the connection was cut"),
    "ClientConnectorError": (errno.ECONNREFUSED, "cannot be reached"),
    "EndpointConnectionError": (errno.ECONNREFUSED, "cannot be reached"),
}
_STATUS = {
    401: "PermissionError",
    403: "PermissionError",
    404: "FileNotFoundError",
    410: "FileNotFoundError",
}


def _reason(exc: Exception) -> tuple[int, str]:
    """Error number and words for what a back end raised."""
    status = getattr(exc, "status", None)
    if isinstance(status, int):
        number, words = _WORDS[_STATUS[status]] if status in _STATUS else (errno.EIO, "refused")
        return number, f"{words}: HTTP {status} {getattr(exc, 'message', '')}".rstrip()
    for cls in type(exc).__mro__:
        if cls.__name__ in _WORDS:
            number, words = _WORDS[cls.__name__]
            return number, f"{words}: {_line(exc)}" if number == errno.ECONNREFUSED else words
    if isinstance(exc, OSError):
        return exc.errno or errno.EIO, exc.strerror or _line(exc)
    return errno.EIO, _line(exc)


def _line(exc: Exception) -> str:
    return _one_line(str(exc)) or type(exc).__name__


def _one_line(text: str) -> str:
    """What a server may have said, printable and not long."""
    line = " ".join(text[:10_000].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"
