"""Decide whether a request that failed is made again, and when."""

from __future__ import annotations

import errno
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from vkv.sources.urls import shown

#: Failures in a row, without a byte between them, after which a read gives up.
MAX_FAILURES = 6
#: Seconds before the second try; each pause is twice the one before.
FIRST_PAUSE = 0.05
#: Seconds that one read waits, in all, because a server asks to be asked again later.
MAX_WAIT = 60.0
#: HTTP: too many requests, and errors of the server that may pass.
_BUSY = (429, 500, 502, 503, 504)


class Retries:
    """Count the failures of one read since its last byte.

    Args:
        url: What is read.
    """

    def __init__(self, url: str):
        self._url, self._failures, self._waited = url, 0, 0.0

    def progressed(self, nbytes: int) -> None:
        """Take note of an answer; one without a byte is a failure.

        Raises:
            OSError: It was the last try.
        """
        self._failures = 0 if nbytes else self._failures + 1
        self._waited = 0.0 if nbytes else self._waited
        if self._failures == MAX_FAILURES:
            text = f"cut {MAX_FAILURES} times without a byte"
            raise OSError(errno.ECONNRESET, text, shown(self._url))

    def failed(self, exc: OSError) -> None:
        """Wait before the next try.

        Raises:
            OSError: ``exc`` itself, if it was the last try or another would not do better.
        """
        asked = _retry_after(exc.__cause__)
        if asked is None:
            self._failures += 1
            pause = FIRST_PAUSE * 2**self._failures
        else:  # it is no failure to be told when to come again
            pause = max(asked, FIRST_PAUSE)
            self._waited += pause
        if not _passes(exc.__cause__) or self._failures == MAX_FAILURES or self._waited > MAX_WAIT:
            raise exc
        time.sleep(pause)


def _passes(exc: BaseException | None) -> bool:
    """Return whether another try may do better: a cut connection, a busy server."""
    import aiohttp

    if isinstance(exc, aiohttp.ClientResponseError):
        return exc.status in _BUSY
    cut = (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)
    return isinstance(exc, cut) and not isinstance(exc, aiohttp.ClientConnectorError)


def _retry_after(exc: BaseException | None) -> float | None:
    """Return the seconds that a server asks to wait, if it does (RFC 9110, 10.2.3)."""
    text = (getattr(exc, "headers", None) or {}).get("Retry-After")
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
