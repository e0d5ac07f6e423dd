"""Store prompts in the background: a bounded queue, and one thread that empties it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vkv.caches.checkpoints.prefill import NEAR
from vkv.store.local.prefix_tree import WIDTH, common_bytes

if TYPE_CHECKING:
    from vkv.caches.saving.request import Progress

#: Prompts that may wait. Each keeps its cache in memory, also after the in-memory prompt
#: cache has evicted it.
QUEUE = 4

_log = logging.getLogger("vkv.serve")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Hold one prompt that waits to be stored.

    Attributes:
        owner: Id of the model.
        tokens: Little-endian u32, as ``vkv.identity.token_bytes`` gives them.
        trims: True if the cache can drop its last tokens, and so serves shorter prompts.
        cache: One mlx-lm cache per layer, evaluated.
        model: The model that filled it.
        tokenizer: Its tokenizer.
        metadata: Text to text, stored with the prompt.
        points: Token counts of its checkpoints, ascending.
    """

    owner: bytes
    tokens: bytes
    trims: bool
    cache: list[Any] = field(repr=False)
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    metadata: dict[str, str] = field(default_factory=dict)
    points: tuple[int, ...] = ()

    def covers(self, owner: bytes, tokens: bytes) -> int:
        """Return the number of leading ``tokens`` that this job will serve once stored."""
        if owner != self.owner:
            return 0
        common = common_bytes(tokens, self.tokens)
        if self.trims or common == len(self.tokens):
            return common // WIDTH
        return max((n for n in self.points if n * WIDTH <= common), default=0)

    def continues(self, other: Job) -> bool:
        """Return True if this prompt begins with all of the other one."""
        return self.owner == other.owner and self.tokens.startswith(other.tokens)

    def serves(self, other: Job) -> bool:
        """Return True if it serves, all but a few tokens, what another does that it continues."""
        count = len(other.tokens) // WIDTH
        near = any(count - NEAR <= n <= count for n in self.points)
        return self.trims or (near and set(other.points) <= set(self.points))


class _GivenUpError(Exception):
    """Signals that the time for writing is over."""


class Writer:
    """Write jobs one after the other in a thread of its own.

    Args:
        write: Called with a job and a progress callback, which may raise to stop it.
        size: Number of jobs that may wait.

    Attributes:
        written: Number of jobs that were written.
        dropped: Number of jobs refused because the queue was full.
    """

    def __init__(self, write: Callable[[Job, Progress], object], size: int = QUEUE):
        self._write, self._size = write, size
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._closing = self._given_up = self._failing = False
        self.written = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="vkv-write", daemon=True)
        self._thread.start()

    def covers(self, owner: bytes, tokens: bytes) -> int:
        """Return the number of leading ``tokens`` that jobs not yet written will serve."""
        with self._changed:
            jobs = [*self._waiting, *([self._current] if self._current else [])]
        return max((job.covers(owner, tokens) for job in jobs), default=0)

    def offer(self, job: Job) -> bool:
        """Queue a job.

        The job replaces a waiting one that it continues, if it serves every prompt that
        the other one would serve, all but a few tokens, or if the queue is full.

        Returns:
            True if the job was queued; False if the queue is full or closed.
        """
        with self._changed:
            if self._closing:
                return False
            full = len(self._waiting) >= self._size
            older = next((i for i, old in enumerate(self._waiting) if job.continues(old)), None)
            if older is not None and (full or job.serves(self._waiting[older])):
                self._waiting[older] = job
            elif full:
                self._drop()
                return False
            else:
                self._waiting.append(job)
            self._changed.notify_all()
            return True

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            text = "%d prompts wait to be written: until that is done others are not stored"
            _log.warning(text, self._size)

    def waiting(self) -> int:
        """Return the number of jobs not yet written, the one being written included."""
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    def close(self, seconds: float) -> int:
        """Write the jobs that wait, for at most ``seconds``, and end the thread.

        Returns:
            Number of jobs that were not written, a half-written one included.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        with self._changed:
            left = len(self._waiting) + (self._current is not None)
            self._given_up = True
            self._waiting.clear()
        if left:
            self._thread.join(1.0)  # a half-written file is cleaned up
        return left

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._try(job)
            job = None  # frees the cache before the next job comes
            with self._changed:
                self._current = None
                self._changed.notify_all()
        if hasattr(mx, "clear_streams"):  # ends MLX's own threads; not in every 0.31
            mx.clear_streams()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._current = self._waiting.popleft() if self._waiting else None
            return self._current

    def _try(self, job: Job) -> None:
        try:
            self._write(job, self._step)
        except _GivenUpError:
            return
        except Exception as exc:  # a fault of the store must not stop the server
            level = logging.DEBUG if self._failing else logging.WARNING
            _log.log(level, "prompts are not stored: %s", exc or type(exc).__name__)
            self._failing = True
        else:
            self.written += 1
            self._failing = False

    def _step(self, done: int, total: int) -> None:
        if self._given_up:
            raise _GivenUpError

    def wait(self, seconds: float) -> bool:
        """Wait until every job is written; return False if that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._current is None, seconds
            )
