"""Let the ranks of a group agree, and give each what the others hold.

All of it is made of ``all_gather``, which every backend of MLX has (the ring sends to
neighbours alone). What can fail runs between two votes and never beside them, so that all
ranks always ask for the same thing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from vkv.distributed.failures import rebuilt, report
from vkv.errors import VkvError
from vkv.sources.base import Buffer

#: Most bytes that a rank sends at a time; each receives so many from every rank.
CHUNK = 1 << 24
#: Seconds that a rank waits for the others, and the variable that says otherwise.
TIMEOUT, VARIABLE = 600.0, "VKV_GROUP_TIMEOUT"
#: Exit status of a process whose group does not answer: EX_TEMPFAIL.
GONE = 75

T = TypeVar("T")


class Ranks:
    """The ranks that hold one model together.

    Args:
        group: Of ``mx.distributed.init()``.
        timeout: Seconds to wait for the others, which may be at work meanwhile; by default
            those in ``VKV_GROUP_TIMEOUT``, or 600. Then the process ends with one line: a
            wait inside MLX cannot be left in another way.
    """

    def __init__(self, group: Any, timeout: float | None = None):
        self._group = group
        self.rank, self.size = int(group.rank()), int(group.size())
        self._timeout = _timeout() if timeout is None else timeout

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and return its own result, once it is done on all.

        Args:
            work: Must not wait for another rank.

        Raises:
            Exception: It failed on some rank; on all ranks that of the first of these.
        """
        done: list[T] = []
        failed: BaseException | None = None
        try:
            done.append(work())
        except BaseException as exc:
            failed = exc
        reports = self.gather(b"" if failed is None else report(failed))
        for rank, raw in enumerate(reports):
            if raw and rank == self.rank and failed is not None:
                raise failed
            if raw:
                raise rebuilt(raw, rank) from failed
        return done[0]

    def same(self, value: bytes, refusal: Callable[[int], VkvError]) -> None:
        """Check that all ranks have the same bytes.

        Raises:
            VkvError: ``refusal`` of the first rank that has others than rank 0.
        """
        first, *others = self.gather(value)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise refusal(rank)

    def gather(self, data: Buffer) -> list[bytes]:
        """Return the bytes that each rank gave, by rank."""
        return [b"".join(pieces) for pieces in zip(*self.chunks(data), strict=True)]

    def chunks(self, data: Buffer) -> Iterator[list[bytes]]:
        """Yield what each rank gave, by rank, ``CHUNK`` bytes of each at a time.

        One that gave fewer bytes than others has empty pieces at the end.
        """
        view = memoryview(data).cast("B")
        lengths = [int.from_bytes(x, "little") for x in self._all(len(view).to_bytes(8, "little"))]
        longest = max(lengths)
        for at in range(0, longest or 1, CHUNK):
            width = min(CHUNK, longest - at)
            pieces = self._all(view[at : at + width], width) if width else [b""] * self.size
            yield [
                piece[: max(0, min(width, length - at))]
                for piece, length in zip(pieces, lengths, strict=True)
            ]

    def _all(self, data: Buffer, width: int | None = None) -> Sequence[bytes]:
        """Return ``width`` bytes of every rank; fewer are filled up with zeros."""
        mine = np.zeros(len(data) if width is None else width, np.uint8)
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        with self._deadline():
            try:
                out = np.array(mx.distributed.all_gather(mx.array(mine), group=self._group))
            except RuntimeError as exc:
                raise VkvError(f"a rank of the group is gone: {exc}") from None
        return [row.tobytes() for row in out.reshape(self.size, len(mine))]

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """End the process if the others do not answer in time."""
        timer = threading.Timer(self._timeout, _end, (self.rank, self._timeout))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def ranks_of(group: Any) -> Ranks | None:
    """Return the ranks of a group; ``None`` for no group, and for one of a single process."""
    return None if group is None or group.size() == 1 else Ranks(group)


def _timeout() -> float:
    text = os.environ.get(VARIABLE, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise VkvError(f"{VARIABLE} is {text!r}, expected a number of seconds")
    return seconds


def _end(rank: int, seconds: float) -> None:
    text = f"vkv: rank {rank} waited {seconds:g} s ({VARIABLE}) for the others, and ends"
    print(text, file=sys.stderr, flush=True)
    os._exit(GONE)
