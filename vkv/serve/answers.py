"""Queue requests for the generation thread, and cancel those that nobody waits for."""

from __future__ import annotations

from queue import Queue
from threading import Lock
from typing import Any


class Client:
    """Stand for who asks.

    Attributes:
        left: True once nobody waits for the answer, also if it is not queued yet.
    """

    left = False


class Answers:
    """Pass what the generation thread says about one request on to its handler.

    Args:
        out: The queue that the handler reads: a context, then responses, then ``None``
            or an exception.
        client: Who asks, for ``Requests.cancel``.

    Attributes:
        alone: True if the request is computed outside of a batch. Then ``put`` may raise,
            which ends that request only.
    """

    def __init__(self, out: Queue[Any], client: Client | None):
        self._out, self.client, self.alone = out, client, False
        self._lock = Lock()
        self._context: Any = None
        self.cancelled: Exception | None = None
        self.ended = False

    def put(self, item: Any) -> None:
        """Pass an item on, unless the request is cancelled.

        Raises:
            Exception: The reason of the cancellation, if the request is alone.
        """
        with self._lock:
            if hasattr(item, "stop"):
                self._context = item
            if self.cancelled is None:
                self.ended = self.ended or item is None or isinstance(item, Exception)
                self._out.put(item)
                return
            if self._context is not None:
                self._context.stop()
        if self.alone and not isinstance(item, Exception) and item is not None:
            raise self.cancelled

    def cancel(self, error: Exception) -> None:
        """Answer with an error, and have mlx-lm stop the request at its next step."""
        with self._lock:
            if self.cancelled is not None or self.ended:
                return
            self.cancelled = error
            if self._context is not None:
                self._context.stop()
            self._out.put(error)


class Requests(Queue):  # type: ignore[type-arg]
    """Queue (queue of answers, request, arguments) for the generation thread.

    It replaces ``ResponseGenerator.requests``. Cancelled requests are never taken out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._closed: Exception | None = None
        self._open: set[Answers] = set()
        self._taken: set[Answers] = set()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add a request; once the queue is closed, answer it with the error."""
        out, request, *rest = item
        answers = Answers(out, getattr(request, "client", None))
        with self._lock:
            if self._closed is not None:
                out.put(self._closed)
                return
            self._open = {x for x in self._open if not x.ended and x.cancelled is None}
            self._open.add(answers)
        if answers.client is not None and answers.client.left:
            answers.cancel(ConnectionAbortedError("the client has gone"))
        super().put((answers, request, *rest), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the next request that is not cancelled; as ``queue.Queue.get``."""
        while True:
            item = super().get(block, timeout)
            with self._lock:
                self._taken = {x for x in self._taken if x in self._open}
                self._taken.add(item[0])
            if item[0].cancelled is None:
                return item

    def cancel(self, client: Client, error: Exception) -> None:
        """Cancel the requests of one client, and those that it will queue."""
        client.left = True
        for answers in self._all():
            if answers.client is client:
                answers.cancel(error)

    def fail(self, error: Exception) -> None:
        """Answer the requests that the generation thread has taken with an error."""
        with self._lock:
            taken, self._taken = self._taken, set()
        for answers in taken:
            answers.cancel(error)

    def close(self, error: Exception) -> None:
        """Answer all requests, and all that will be put, with an error."""
        with self._lock:
            self._closed = error
        for answers in self._all():
            answers.cancel(error)

    def _all(self) -> list[Answers]:
        with self._lock:
            return list(self._open)
