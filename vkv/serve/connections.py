"""Accept HTTP connections within the limits of the process, and notice clients that leave."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

#: Connections at a time; each has a thread.
MAX_CONNECTIONS = 512
#: File descriptors that connections leave to the store and to the model.
RESERVED = 24
#: Seconds a connection may always read for, before it must make room for others.
SPARED = 0.5
#: Seconds for a whole request to arrive, and for a client to take each piece of an answer.
READ, WRITE = 60.0, 30.0
_PAUSE = 0.05  # seconds
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("vkv.serve")


class TimedReader(io.RawIOBase):
    """Read a socket until a deadline that covers all reads together.

    Args:
        connection: Stays open when the reader is closed.
        seconds: From now to the deadline.

    Raises:
        TimeoutError: Once the deadline has passed.
    """

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as ``buffer`` holds; 0 at the end."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not arrive in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


@dataclass(eq=False)
class _Client:
    """Hold the state of one connection; ``gone`` is set while it waits for an answer."""

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    gone: Callable[[], object] | None = None
    reading: bool = True


class Connections:
    """Keep the list of open connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, _Client] = {}

    def enter(self, connection: socket.socket) -> None:
        """Add a connection whose request is to be read."""
        with self._lock:
            self._clients[connection] = _Client(connection)

    def leave(self, connection: socket.socket) -> None:
        """Remove a connection, before it is closed."""
        with self._lock:
            self._clients.pop(connection, None)

    def answering(self, connection: socket.socket, gone: Callable[[], object]) -> None:
        """Note that a request has arrived; call ``gone`` if its client leaves."""
        with self._lock:
            if client := self._clients.get(connection):
                client.reading, client.gone = False, gone

    def full(self) -> bool:
        """Return True if there is no room for another connection."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            # The system gives out the lowest free number, so a high one means few are free.
            highest = max((c.fileno() for c in self._clients), default=0)
            tight = bool(self._clients) and soft != resource.RLIM_INFINITY
            return len(self._clients) >= MAX_CONNECTIONS or (tight and highest >= soft - RESERVED)

    def evict(self) -> bool:
        """End the connection that has read the longest; return False if all must be spared."""
        latest = time.monotonic() - SPARED
        with self._lock:
            reading = [c for c in self._clients.values() if c.reading and c.since < latest]
            if not reading:
                return False
            oldest = min(reading, key=lambda client: client.since)
            oldest.reading = False
            with contextlib.suppress(OSError):
                oldest.connection.shutdown(socket.SHUT_RDWR)
        return True

    def poll(self) -> None:
        """Tell the requests whose clients have closed their connections.

        A client that only ends its own sending is taken for one that has left, too: the
        two look the same until something is sent.
        """
        with self._lock:
            waiting = {c.connection.fileno(): c for c in self._clients.values() if c.gone}
            poller = select.poll()
            for descriptor in waiting:
                poller.register(descriptor, select.POLLIN)
            readable = poller.poll(0) if waiting else []
            left = [waiting[fd] for fd, _ in readable if _at_end(waiting[fd].connection)]
            callbacks = [client.gone for client in left]
            for client in left:
                client.gone = None
        for gone in callbacks:
            if gone is not None:
                gone()


def _at_end(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


class HttpServer(ThreadingHTTPServer):
    """Answer each connection in a thread of its own.

    Attributes:
        connections: The open ones.
        underway: Threads that answer a request.
        boundary: Names and pages for ``vkv.serve.boundary.check_site``.
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, *args: Any):
        self.connections = Connections()
        self.underway: set[threading.Thread] = set()
        super().__init__(*args)

    def service_actions(self) -> None:
        """Look for clients that have left; called several times a second."""
        self.connections.poll()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, or pause if there is no room for it.

        Raises:
            OSError: If there is no room; the next call tries again.
        """
        if self.connections.full() and not self.connections.evict():
            time.sleep(_PAUSE)
            raise OSError(errno.EMFILE, "too many connections")
        try:
            connection, address = super().get_request()
        except OSError as exc:
            if exc.errno in _NO_ROOM and not self.connections.evict():
                time.sleep(_PAUSE)
            raise
        self.connections.enter(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line: mostly the client has gone, or the server is being closed."""
        exc = sys.exception()
        _log.warning("a request of %s failed: %s", client_address[0], exc or type(exc).__name__)


def listen(host: str, port: int, handle: Any) -> HttpServer:
    """Listen on an address of any family.

    Raises:
        OSError: If the address cannot be listened on.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    cls = type("HttpServer", (HttpServer,), {"address_family": family})
    server: HttpServer = cls(address, handle)
    return server
