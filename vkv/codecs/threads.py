"""Run independent pieces of work in several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, TypeVar

__all__ = ["cores", "in_threads"]

T = TypeVar("T")

#: More would wait for Python's lock, which each holds between two steps of its work.
MAX_THREADS = 16


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(
    call: Callable[..., T], items: Sequence[tuple[Any, ...]], *, alone: bool = False
) -> list[T]:
    """Call a function with each tuple of arguments, in this thread and in others.

    It gains where the work is done in libraries that release Python's lock: NumPy,
    pcodec and Zstandard do, while they work on an array. This thread works too, and no
    queue stands between: an executor's wake-ups cost more than a piece of 1 ms brings.

    Args:
        call: The function.
        items: Arguments of each call.
        alone: Stay in this thread, where the work is less than starting others.

    Returns:
        What each call returned, in the order of ``items``.

    Raises:
        Exception: One that a call raised; no further calls are begun then.
    """
    threads = min(len(items), cores(), MAX_THREADS)
    if threads < 2 or alone:
        return [call(*item) for item in items]
    left = deque(range(len(items)))
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while left and not errors:
            try:
                place = left.popleft()
                found[place] = call(*items[place])
            except IndexError:  # another thread took the last one
                return
            except BaseException as exc:
                errors.append(exc)

    others = [Thread(target=work) for _ in range(threads - 1)]
    for other in others:
        other.start()
    work()
    for other in others:
        other.join()
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(items))]
