"""Read ranges over http(s), in the session that fsspec keeps.

fsspec's own ``cat_file`` takes whatever a server sends that ignores ``Range``; here
an answer must be part of the range that was asked for. Digests decide whether the bytes
are right; an ``ETag`` does not: nodes of one CDN have different ones for one object.
"""

from __future__ import annotations

import errno
import re
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from vkv.errors import ContainerError, VkvError
from vkv.sources.backend_errors import naming
from vkv.sources.base import FIRST_READ, Source
from vkv.sources.memory import BytesSource
from vkv.sources.ranged import RangedSource
from vkv.sources.retries import Retries
from vkv.sources.urls import shown

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from fsspec.implementations.http import HTTPFileSystem

#: Bytes up to which a file of a server without ranged reads is read whole.
MAX_WHOLE = 1 << 26
#: The largest object whose size is searched for, where a server does not say it.
MAX_SEARCHED = 1 << 44
_RANGE = re.compile(r"bytes (?P<start>\d+)-(?P<last>\d+)/(?P<size>\d+|\*)")
_UNKNOWN = -1


def http_source(files: HTTPFileSystem, url: str) -> Source:
    """Open the object behind ``url``: by range, or whole where the server has no ranges.

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

    An answer with a part of a range is continued, and so is a connection that is cut. Only
    failures without a byte between them count as tries.
    """

    def __init__(self, files: HTTPFileSystem, url: str):
        super().__init__(url)
        self._files = files
        self.size = _UNKNOWN
        buffer = memoryview(bytearray(FIRST_READ))
        done = self._fill(0, buffer)
        self._head = bytes(buffer[:done])
        if self.size == _UNKNOWN:
            self.size = done if done < FIRST_READ else self._find_size()

    def _fetch(self, start: int, buffer: memoryview) -> None:
        done = self._fill(start, buffer)
        if done != len(buffer):
            end, expected = start + done, start + len(buffer)
            raise ContainerError(f"ends at byte {end}, expected {expected}", rule="C1")

    def _fill(self, start: int, buffer: memoryview) -> int:
        """Read until ``buffer`` is full or the object ends; return the number of bytes."""
        from fsspec.asyn import sync

        done, retries = 0, Retries(self.url)
        while done < len(buffer) and start + done != self.size:
            came = 0
            try:
                with naming(self.url):
                    came = sync(self._files.loop, self._get, start + done, buffer[done:])
            except _EndError:
                break
            except OSError as exc:
                retries.failed(exc)
            else:
                retries.progressed(came)
            done += came
        return done

    async def _get(self, start: int, buffer: memoryview) -> int:
        """Make one request; return how many bytes came before the connection ended."""
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
        """Return how many bytes of the range from ``start`` the answer has.

        Raises:
            OSError: It has other bytes, or those of an object of another size.
        """
        sent = answer.headers.get("Content-Range", "")
        if answer.status == 416 and self._ends_at(sent, start):
            raise _EndError(f"no byte {start}", at=shown(self.url))
        if answer.status == 200:
            raise _NoRangesError("the server stopped serving ranges", at=shown(self.url))
        answer.raise_for_status()
        part = _RANGE.fullmatch(sent)
        if answer.status != 206 or part is None or int(part["start"]) != start:
            text = f"HTTP {answer.status}, Content-Range {sent!r}, expected 206 from byte {start}"
            raise OSError(errno.EPROTO, text)
        if part["size"] != "*":
            self._same_size(int(part["size"]))
        if int(part["last"]) < start:
            raise _EndError(f"no byte {start}", at=shown(self.url))
        return int(part["last"]) + 1 - start

    def _ends_at(self, sent: str, start: int) -> bool:
        """Return whether a refused range lies behind the end of an object of the known size."""
        if sent.startswith("bytes */") and sent.removeprefix("bytes */").isdigit():
            self._same_size(int(sent.removeprefix("bytes */")))
        return self.size in (_UNKNOWN, start)

    def _same_size(self, size: int) -> None:
        if self.size == _UNKNOWN:
            self.size = size
        if size != self.size:
            raise OSError(errno.ESTALE, f"{size} bytes, it had {self.size} when it was opened")

    def _find_size(self) -> int:
        """Return the size of an object whose server does not say it with its ranges."""
        from fsspec.asyn import sync

        try:
            with naming(self.url):
                length = sync(self._files.loop, _length, self._files, self.url)
        except (OSError, VkvError):
            length = None
        return self._search_size() if length is None else int(length)

    def _search_size(self) -> int:
        """Find the last byte by asking for single ones: doubling, then halving."""
        low, high = FIRST_READ, 2 * FIRST_READ  # byte low - 1 exists
        while self._has(high - 1):
            low, high = high, 2 * high
            if high > MAX_SEARCHED:
                raise OSError(errno.EIO, "the server does not say its size", shown(self.url))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(middle - 1) else (low, middle)
        return low

    def _has(self, at: int) -> bool:
        return self._fill(at, memoryview(bytearray(1))) == 1


class _NoRangesError(VkvError):
    """The server answers a range with the whole."""


class _EndError(VkvError):
    """The object has no byte where a range begins."""


async def _answer(
    files: HTTPFileSystem, url: str, headers: dict[str, str], method: str = "get"
) -> AbstractAsyncContextManager[ClientResponse]:
    from aiohttp import ClientTimeout

    session = await files.set_session()
    options: dict[str, Any] = dict(files.kwargs)
    own = {"Accept-Encoding": "identity"} | headers
    options["headers"] = dict(options.get("headers", {})) | own
    options["timeout"] = ClientTimeout(total=None, sock_connect=30, sock_read=60)
    request: AbstractAsyncContextManager[ClientResponse] = getattr(session, method)(
        files.encode_url(url), **options
    )
    return request


async def _length(files: HTTPFileSystem, url: str) -> int | None:
    async with await _answer(files, url, {}, "head") as answer:
        answer.raise_for_status()
        return answer.content_length


async def _whole(files: HTTPFileSystem, url: str) -> bytes:
    body = bytearray()
    async with await _answer(files, url, {}) as answer:
        answer.raise_for_status()
        size = answer.content_length or 0
        while size <= MAX_WHOLE and (piece := await answer.content.readany()):
            body += piece
            size = max(size, len(body))
    if size > MAX_WHOLE:
        text = f"no ranged reads, and {size} bytes or more; whole it is read up to {MAX_WHOLE}"
        raise OSError(errno.EFBIG, f"the server has {text}: download it first")
    return bytes(body)
