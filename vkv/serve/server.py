"""Run a server: the models with their threads, and HTTP before them."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

from vkv.errors import VkvError
from vkv.serve import upstream
from vkv.serve.connections import listen
from vkv.serve.disk import Disk
from vkv.serve.front import Front, Rules
from vkv.serve.large import LargeRequests

#: Seconds that ``close`` takes at most, by default.
STOP = 4.0
#: Share of it for answers that are being computed or sent; writing gets the rest.
_ANSWERS = 0.5


class Server:
    """Serve models over HTTP as mlx_lm.server does, over a store.

    Args:
        args: As ``upstream.arguments`` makes them. Port 0 takes a free one.
        disk: The store; closed with the server.

    Raises:
        VkvError: If the address cannot be listened on.
    """

    def __init__(self, args: argparse.Namespace, disk: Disk):
        self._args, self.disk = args, disk
        try:
            self._http = listen(args.host, args.port, self._handle)
        except (OSError, OverflowError) as exc:
            disk.close(0)
            reason = getattr(exc, "strerror", None) or exc
            raise VkvError(f"cannot listen on {args.host}:{args.port}: {reason}") from exc
        self._accept = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="vkv-http", daemon=True
        )
        self._large = LargeRequests()
        self.models: list[Any] = []
        self._front: Front | None = None

    @property
    def url(self) -> str:
        """Address of the API."""
        host, port = (str(x) for x in self._http.server_address[:2])
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    @property
    def failed(self) -> bool:
        """True if generation has ended by faults; then no request can be served."""
        return any(model.failed for model in self.models)

    def start(self, died: Callable[[], object] = lambda: None) -> None:
        """Load the models, then serve in threads of its own.

        Args:
            died: Called when ``failed`` becomes true, in another thread.

        Raises:
            VkvError: If two models have the same name.
            Exception: What mlx-lm raised when it loaded a model.
        """
        from vkv.serve.served_model import ServedModel

        upstream.wire_memory()
        for args in upstream.each_model(self._args):
            self.models.append(ServedModel(args, self.disk, self._large, died))
            self.models[-1].wait()
        self._front = Front(self.models, Rules.of(self._args), self._large)
        self._accept.start()

    def close(self, seconds: float = STOP) -> bool:
        """Refuse new requests, end those that run, and write the prompts that wait.

        Args:
            seconds: Most time for all of it; prompts not written by then are dropped.

        Returns:
            False if a thread still computes when the time is over. The process can then
            only be ended by ``os._exit``.
        """
        end = time.monotonic() + seconds
        answers = time.monotonic() + seconds * _ANSWERS
        for model in self.models:
            model.stop()
        ended = [self._stop_accepting(_left(answers))]
        self._http.server_close()
        self._large.close()
        ended += [model.join(_left(answers)) for model in self.models]
        for thread in list(self._http.underway):
            thread.join(_left(answers))
        self.disk.close(_left(end))
        return all(ended)

    def _stop_accepting(self, seconds: float) -> bool:
        """End the thread that accepts; ``shutdown`` of the standard library waits without end."""
        if self._accept.ident is None:
            return True
        threading.Thread(target=self._http.shutdown, daemon=True).start()
        self._accept.join(seconds)
        return not self._accept.is_alive()

    def _handle(self, *connection: Any) -> Any:
        from vkv.serve.handler import Handler

        assert self._front is not None  # connections are accepted once it is set
        return Handler(self._front, *connection)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
