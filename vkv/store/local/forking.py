"""Let objects with locks and connections survive a fork.

A child has only the thread that forked. A lock that another thread held stays locked for
ever, and SQLite forbids to use a connection of the parent. So all such locks are taken
before a fork, and the child begins with new ones.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

#: Seconds to wait, before a fork, for a thread that holds a lock.
FORK_PATIENCE = 5.0

_live: dict[int, weakref.ref[ForkSafeLock]] = {}
_taken = threading.local()


class ForkSafeLock:
    """A reentrant lock that no child process inherits locked.

    Args:
        in_child: A method that drops what a child must not use, called there.
    """

    def __init__(self, in_child: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self._in_child = weakref.WeakMethod(in_child)
        number = id(self)
        _live[number] = weakref.ref(self, lambda _: _live.pop(number, None))

    def renew(self) -> None:
        """Replace the lock, in a child."""
        self.lock = threading.RLock()
        if (in_child := self._in_child()) is not None:
            in_child()


def _locks() -> list[ForkSafeLock]:
    return [found for ref in list(_live.values()) if (found := ref()) is not None]


def _before() -> None:
    _taken.locks = [x for x in _locks() if x.lock.acquire(timeout=FORK_PATIENCE)]


def _in_parent() -> None:
    for taken in _taken.locks:
        taken.lock.release()
    _taken.locks = []


def _renew_in_child() -> None:
    _taken.locks = []
    for inherited in _locks():
        inherited.renew()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_renew_in_child)
