"""Share threads that read and hash; both release the interpreter."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

#: Threads that read and hash.
HASHERS = min(16, os.cpu_count() or 1)


@cache
def threads(count: int = HASHERS) -> ThreadPoolExecutor:
    """Return a pool of ``count`` threads, the same one each time."""
    return ThreadPoolExecutor(count, "vkv-read")
