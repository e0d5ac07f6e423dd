"""Servers on 127.0.0.1: plain http with and without ranges and with faults; S3."""

from __future__ import annotations

import http.server
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Web:
    """What a server has, how it behaves, and what it was asked for.

    Attributes:
        files: Path to content.
        ranges: Serve ranges; else every answer is the whole.
        cut: Bytes of body after which each connection is cut; ``None`` for never.
        busy: So many answers are 503 first.
        status: Answer everything with this.
        raw: Written instead of any answer.
        told: Replaces the header ``Content-Range``.
        total: Replaces the size in ``Content-Range``, like ``*``.
        piece: Most bytes of one answer.
        tags: ETags of one answer after another; ``None`` for none.
        later: So many answers after each good one are 429.
        retry_after: Header of those.
        secret: Answer 401 unless the query is this one.
        asked: ``(path, Range header or None)`` of every request so far.
        sent: Bytes of body so far.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut: int | None = None
    busy: int = 0
    status: int | None = None
    raw: bytes = b""
    told: str | None = None
    total: str | None = None
    piece: int | None = None
    tags: tuple[str | None, ...] = ('"1"',)
    later: int = 0
    retry_after: str = "0"
    secret: str | None = None
    _refusals: int = 0
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0
    url: str = ""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_GET(self) -> None:  # the library's name
        web, path = self.web, self.path.partition("?")[0]
        web.asked.append((self.path, self.headers.get("Range")))
        if web.raw:
            self.close_connection = True
            self.wfile.write(web.raw)
            return None
        if web.busy > 0:
            web.busy -= 1
            return self._head(503, {})
        if web.secret is not None and self.path.partition("?")[2] != web.secret:
            return self._head(401, {})
        if web._refusals > 0:
            web._refusals -= 1
            return self._head(429, {"Retry-After": web.retry_after})
        web._refusals = web.later
        if web.status is not None or path not in web.files:
            return self._head(web.status or 404, {})
        data = web.files[path]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not web.ranges or asked is None:
            return self._body(200, data, {})
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        if start >= len(data):
            return self._head(416, {"Content-Range": f"bytes */{web.total or len(data)}"})
        stop = min(stop, start + (web.piece or len(data)))
        told = web.told or f"bytes {start}-{stop - 1}/{web.total or len(data)}"
        return self._body(206, data[start:stop], {"Content-Range": told})

    def do_CONNECT(self) -> None:  # the library's name
        """Refuse to be a proxy, and remember that it was asked."""
        self.web.asked.append((self.path, None))
        self._head(self.web.status or 405, {})

    def _body(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        tag = self.web.tags[len(self.web.asked) % len(self.web.tags)]
        self._head(status, headers | ({} if tag is None else {"ETag": tag}), len(data))
        cut = len(data) if self.web.cut is None else self.web.cut
        self.wfile.write(data[:cut])
        self.web.sent += len(data[:cut])
        self.close_connection = cut < len(data)

    def _head(self, status: int, headers: dict[str, str], size: int = 0) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(size)}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client may leave as it likes."""


@contextmanager
def web(**options: object) -> Iterator[Web]:
    """A running server; ``url`` has no slash at its end."""
    found = Web(**options)  # type: ignore[arg-type]
    handler = type("Handler", (_Handler,), {"web": found})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3() -> Iterator[str]:
    """Run an S3 that keeps its objects in memory, and yield its URL.

    The environment points there meanwhile. s3fs reuses the connections it made in this process,
    also those to a server that is gone, so it forgets them first.
    """
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    own = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield own["AWS_ENDPOINT_URL"]
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.stop()
