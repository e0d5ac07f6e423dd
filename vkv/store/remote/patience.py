"""Bound the time that answers wait for a remote."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from vkv.errors import VkvError

_log = logging.getLogger("vkv.store")
#: Seconds in which a remote that failed is not asked again: at first, and at most.
FIRST_PAUSE, LAST_PAUSE = 30.0, 600.0


class Patience:
    """Call a remote for a limited time, and leave it alone for a while after it failed.

    Pauses double with each failure in a row. A call that takes longer than the deadline
    goes on in the background; until it ends there is no other.

    Args:
        deadline: Seconds to wait for one call.
    """

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._lock = threading.Lock()
        self._failures = 0
        self._paused_until = 0.0
        self._running: threading.Thread | None = None

    def __getstate__(self) -> float:
        return self._deadline

    def __setstate__(self, deadline: float) -> None:
        Patience.__init__(self, deadline)

    def attempt(self, act: Callable[[], object], *, deadline: float | None = None) -> None:
        """Call ``act``, unless the remote failed a short while ago or is still busy.

        Errors of vkv and of the file system are logged; others are raised.

        Args:
            act: Called in a thread of its own, which does not keep the process alive.
            deadline: Seconds to wait, instead of those of this object.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._call, args=(act, errors), daemon=True)
        with self._lock:
            if time.monotonic() < self._paused_until or self._is_busy():
                return
            self._running = thread
            thread.start()
        seconds = self._deadline if deadline is None else deadline
        thread.join(seconds)
        if thread.is_alive():
            self._fail(TimeoutError(f"no answer within {seconds:g} s"))
        elif errors:
            if not isinstance(errors[0], VkvError | OSError):
                raise errors[0]
            self._fail(errors[0])

    def _is_busy(self) -> bool:
        return self._running is not None and self._running.is_alive()

    def _call(self, act: Callable[[], object], errors: list[BaseException]) -> None:
        try:
            act()
        except BaseException as exc:
            errors.append(exc)
        else:
            self._failures, self._paused_until = 0, 0.0

    def _fail(self, exc: Exception) -> None:
        pause = min(FIRST_PAUSE * 2**self._failures, LAST_PAUSE)
        self._failures += 1
        self._paused_until = time.monotonic() + pause
        _log.warning("remote: %s; not asked for %d s", exc, pause)
