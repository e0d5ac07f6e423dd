"""Ranged reads over http(s), in the session that fsspec keeps.

fsspec's own ``cat_file`` takes whatever a server sends that ignores ``Range``; here
an answer must be the range that was asked for, of the object that was opened.
"""

from __future__ import annotations

import errno
import re
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from vkv.errors import ContainerError, VkvError
from vkv.sources.backend_errors import naming
from vkv.sources.base import FIRST_READ, Source
from vkv.sources.memory import BytesSource
from vkv.sources.ranged import RangedSource
from vkv.sources.urls import shown

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from fsspec.implementations.http import HTTPFileSystem

#: A file of a server without ranged reads is read whole up to this size.
WHOLE = 1 << 26
#: Connections that may be cut, or refused for the moment, while one piece is read.
TRIES = 5
_BUSY = (429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (?P<start>\d+)-(?P<last>\d+)/(?P<size>\d+)")


def http_source(files: HTTPFileSystem, url: str) -> Source:
    """The object behind ``url``: by range, or whole where the server has no ranges.

    Raises:
        OSError: Not found, not reached, or too large to be read whole.
    """
    from fsspec.asyn import sync

    try:
        return HttpSource(files, url)
    except _NoRangesError:
        with naming(url):
            return BytesSource(sync(files.loop, _whole, files, url))


class HttpSource(RangedSource):
    """One object of a server that serves ranges; opening it takes one request.

    A cut connection is taken up where it ended. An object that is replaced while
    it is read is noticed by its size or its ``ETag``.
    """

    def __init__(self, files: HTTPFileSystem, url: str):
        super().__init__(url)
        self._files = files
        self._tag: str | None = None
        self.size = -1  # the first answer tells
        buffer = memoryview(bytearray(FIRST_READ))
        self._head = bytes(buffer[: self._fill(0, buffer)])

    def _fetch(self, start: int, buffer: memoryview) -> None:
        done = self._fill(start, buffer)
        if done != len(buffer):
            end, expected = start + done, start + len(buffer)
            raise ContainerError(f"ends at byte {end}, expected {expected}", rule="C1")

    def _fill(self, start: int, buffer: memoryview) -> int:
        """Read until ``buffer`` is full or the object ends; how many bytes that is."""
        from fsspec.asyn import sync

        done = 0
        for attempt in range(TRIES):
            try:
                with naming(self.url):
                    done += sync(self._files.loop, self._get, start + done, buffer[done:])
            except OSError as exc:
                if attempt + 1 == TRIES or not _passes(exc.__cause__):
                    raise
                time.sleep(0.05 * 2**attempt)
            if done == len(buffer) or start + done == self.size:
                return done
        raise OSError(errno.ECONNRESET, f"cut {TRIES} times in one range", shown(self.url))

    async def _get(self, start: int, buffer: memoryview) -> int:
        """One request; how many bytes came before the connection ended."""
        from aiohttp import ClientPayloadError

        wanted = {"Range": f"bytes={start}-{start + len(buffer) - 1}"}
        async with await _answer(self._files, self.url, wanted) as answer:
            room = min(self._check(answer, start), len(buffer))
            done = 0
            try:
                while done < room and (piece := await answer.content.readany()):
                    piece = piece[: room - done]
                    buffer[done : done + len(piece)] = piece
                    done += len(piece)
            except (ClientPayloadError, ConnectionError):
                if done == 0:
                    raise
            return done

    def _check(self, answer: ClientResponse, start: int) -> int:
        """How many bytes the answer has of the range from ``start``; raises if it has others."""
        told = answer.headers.get("Content-Range", "")
        if answer.status == 416 and told == "bytes */0":
            self.size = 0
            return 0
        if answer.status == 200:
            raise _NoRangesError("the server stopped serving ranges", at=shown(self.url))
        answer.raise_for_status()
        found = _RANGE.fullmatch(told)
        if answer.status != 206 or found is None or int(found["start"]) != start:
            text = f"HTTP {answer.status}, Content-Range {told!r}, expected 206 from byte {start}"
            raise OSError(errno.EPROTO, text)
        size, tag = int(found["size"]), answer.headers.get("ETag")
        if self.size < 0:
            self.size, self._tag = size, tag
        if (size, tag) != (self.size, self._tag):
            raise OSError(errno.ESTALE, "it was replaced while it was read")
        return int(found["last"]) + 1 - start


class _NoRangesError(VkvError):
    """The server answers a range with the whole."""


async def _answer(
    files: HTTPFileSystem, url: str, headers: dict[str, str]
) -> AbstractAsyncContextManager[ClientResponse]:
    from aiohttp import ClientTimeout

    session = await files.set_session()
    options: dict[str, Any] = dict(files.kwargs)
    own = {"Accept-Encoding": "identity"} | headers
    options["headers"] = dict(options.get("headers", {})) | own
    options["timeout"] = ClientTimeout(total=None, sock_connect=30, sock_read=60)
    found: AbstractAsyncContextManager[ClientResponse] = session.get(
        files.encode_url(url), **options
    )
    return found


async def _whole(files: HTTPFileSystem, url: str) -> bytes:
    found = bytearray()
    async with await _answer(files, url, {}) as answer:
        answer.raise_for_status()
        size = answer.content_length or 0
        while size <= WHOLE and (piece := await answer.content.readany()):
            found += piece
            size = max(size, len(found))
    if size > WHOLE:
        text = f"no ranged reads, and {size} bytes or more; whole it is read up to {WHOLE}"
        raise OSError(errno.EFBIG, f"the server has {text}: download it first")
    return bytes(found)


def _passes(exc: BaseException | None) -> bool:
    """Whether another attempt may do better: a cut connection, a busy server."""
    import aiohttp

    if isinstance(exc, aiohttp.ClientResponseError):
        return exc.status in _BUSY
    cut = (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)
    return isinstance(exc, cut) and not isinstance(exc, aiohttp.ClientConnectorError)
