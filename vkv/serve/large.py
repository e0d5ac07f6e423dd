"""Work on large requests in one thread, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

#: Bytes from which a request is large: to tokenize 1 MB takes about a second.
LARGE = 1 << 15

T = TypeVar("T")


class LargeRequests:
    """Decode and tokenize large requests.

    Such work takes seconds, and up to 100 MB for each MB of text, which the allocator of
    the system keeps for the thread that used it. In one thread it delays large requests
    alone, and that memory is taken once.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vkv-large")

    def run(self, nbytes: int, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function, in the thread for large requests if ``nbytes`` is large."""
        if nbytes <= LARGE:
            return function(*args, **options)
        return self._worker.submit(function, *args, **options).result()

    def close(self) -> None:
        """Drop the work that waits."""
        self._worker.shutdown(wait=False, cancel_futures=True)
