"""Answer HTTP requests by mlx_lm.server's handler, after they have been checked as a whole."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import threading
import uuid
from typing import Any
from urllib.parse import unquote, urlsplit

from mlx_lm.server import APIHandler

from vkv.serve import body, boundary, completion, images
from vkv.serve.answers import Client
from vkv.serve.connections import READ, WRITE, HttpServer, TimedReader
from vkv.serve.front import Front
from vkv.serve.generator import Request
from vkv.serve.recorder import ErrorRecorder
from vkv.serve.request import ChatRequest
from vkv.serve.request_error import RequestError

#: Seconds for which the rest of a refused body is read: a client that still sends when the
#: connection is closed may not see the answer.
DRAIN = 2.0

_log = logging.getLogger("vkv.serve")
_CHAT = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}


class Handler(APIHandler):  # type: ignore[misc]  # mlx-lm has no types
    """Answer one connection, which carries one request.

    An error of mlx-lm goes to ``_held`` instead of the client, and is then written as the
    OpenAI API writes it; mlx-lm's own has always status 404.

    Args:
        front: The models and the rules.
        connection: As ``http.server.BaseHTTPRequestHandler``.
    """

    path: str
    rfile: Any
    wfile: Any
    server: HttpServer
    _held: io.BytesIO | None = None
    _begun = False
    _unread = 0

    def __init__(self, front: Front, *connection: Any):
        self.front, self._client = front, Client()
        super().__init__(front.models[0], *connection)

    def setup(self) -> None:
        """Give the request, head and body together, a time to arrive."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(TimedReader(self.connection, READ))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log a line about a request."""
        _log.info("%s %s", self.client_address[0], format % args)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log the head of an answer, unless a completion follows, which has a line of its own."""
        if not (self.command == "POST" and code == 200):
            super().log_request(code, size)

    def do_POST(self) -> None:  # noqa: N802
        """Answer with a completion, or with an error."""
        self.server.underway.add(threading.current_thread())
        try:
            self._complete()
        except RequestError as exc:
            self._refuse(exc)
        except (ConnectionError, TimeoutError) as exc:
            self._disconnect(exc)
        except Exception as exc:  # of mlx-lm, after the answer was begun
            _log.warning("a request failed: %s", exc or type(exc).__name__, exc_info=True)
            self._refuse(RequestError(f"{type(exc).__name__}: {exc}", status=500))
        finally:
            self.server.underway.discard(threading.current_thread())

    def do_GET(self) -> None:  # noqa: N802
        """Answer ``/health``, ``/v1/models`` and ``/v1/models/NAME``."""
        try:
            self._check_site()
            self._get(urlsplit(self.path).path)
        except RequestError as exc:
            self._refuse(exc)

    def do_OPTIONS(self) -> None:  # noqa: N802
        """Answer the question of a browser whether a page may send requests."""
        try:
            self._check_site()
            super().do_OPTIONS()
        except RequestError as exc:
            self._refuse(exc)

    def _get(self, path: str) -> None:
        if path == "/health":
            failed = self.front.failed
            self._answer(503 if failed else 200, {"status": "unavailable" if failed else "ok"})
        elif path.rstrip("/") == "/v1/models":
            self._answer(200, {"object": "list", "data": self.front.listing(self.created)})
        elif path.startswith("/v1/models/"):
            name = unquote(path.removeprefix("/v1/models/"))
            self.front.find(name)
            listed = self.front.listing(self.created)
            self._answer(200, next(model for model in listed if model["id"] == name))
        else:
            raise RequestError(f"nothing is at {path[:200]}", status=404)

    def _check_site(self) -> None:
        rules, local = self.front.rules, self.connection.getsockname()[0]
        boundary.check_site(self.headers, local=local, hosts=rules.hosts, origins=rules.origins)

    def _complete(self) -> None:
        chat = self._read_head()
        data = self._read_body()
        self.server.connections.answering(self.connection, self._gone)
        self.connection.settimeout(WRITE)
        parsed = self.front.large.run(len(data), completion.parse, data, chat=chat)
        model = self.front.find(parsed.model, parsed.adapters)
        completion.check_limits(parsed, model.limits)
        with_images = isinstance(parsed, ChatRequest) and images.inline(
            parsed.messages, fetch=self.front.rules.image_urls
        )
        self.__dict__.update(completion.settings(parsed, model.limits, model.cli_args))
        self._name_answer(chat)
        request = Request(
            **completion.content(parsed), client=self._client, nbytes=len(data),
            images=with_images,
        )  # fmt: skip
        self._generate(request, completion.stop_words(parsed), ErrorRecorder(model, self._hides()))

    def _hides(self) -> bool:
        return self.front.rules.hide_cached

    def _read_head(self) -> bool:
        """Check the head of a request; return True for a chat."""
        self._unread = body.MAX_BODY
        path = urlsplit(self.path).path
        if path not in _CHAT:
            raise RequestError(f"nothing is at {path[:200]}", status=404)
        self._check_site()
        boundary.check_type(self.headers)
        self._unread = body.length(self.headers["Content-Length"])
        return _CHAT[path]

    def _read_body(self) -> bytes:
        if self.headers.get("Expect", "").strip().lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            data: bytes = self.rfile.read(self._unread)
        except TimeoutError as exc:
            raise RequestError(f"the request did not arrive in {READ:g} s", status=408) from exc
        size, self._unread = self._unread, 0
        if len(data) < size:
            raise RequestError(f"a body of {len(data)} bytes, Content-Length is {size}")
        return data

    def _gone(self) -> None:
        self.front.cancel(self._client, ConnectionAbortedError("the client has gone"))

    def _name_answer(self, chat: bool) -> None:
        """Set what mlx_lm.server sets for each of its paths."""
        self.request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4()}"
        kind = "chat.completion.chunk" if self.stream else "chat.completion"
        self.object_type = kind if chat else "text_completion"

    def _generate(self, request: Request, stop_words: list[str], recorder: ErrorRecorder) -> None:
        self.response_generator, wire = recorder, self.wfile
        try:
            self.handle_completion(request, stop_words)
        finally:
            self.wfile = wire
            self.front.cancel(self._client, ConnectionAbortedError("the answer has ended"))
        if self._held is not None:
            raise recorder.error or RequestError("the request was refused")
        self.log_message("%s", recorder.summary())

    def generate_response(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Make an answer, or a piece of one."""
        return self._hidden(super().generate_response(*args, **options))

    def completion_usage_response(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Make the last piece of a streamed answer."""
        return self._hidden(super().completion_usage_response(*args, **options))

    def _hidden(self, answer: dict[str, Any]) -> dict[str, Any]:
        details = answer.get("usage", {}).get("prompt_tokens_details")
        if details and self._hides():
            details["cached_tokens"] = 0
        return answer

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if status_code < 400:
            super()._set_completion_headers(status_code)
            return
        self._headers_buffer: list[bytes] = []
        self._held = self.wfile = io.BytesIO()

    def end_headers(self) -> None:
        """Write the head; from here on the status cannot change."""
        self._begun = self._begun or self._held is None
        super().end_headers()

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error; where the answer has begun, as its last event."""
        self._held = None
        with contextlib.suppress(ConnectionError, TimeoutError):
            if self._begun:
                self.wfile.write(b"data: " + json.dumps(error.to_dict()).encode() + b"\n\n")
                return
            self._headers_buffer = []
            self._answer(error.status, error.to_dict())
            self._drain()

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        super()._set_completion_headers(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drain(self) -> None:
        if not self._unread:
            return
        self.connection.shutdown(socket.SHUT_WR)
        rest = TimedReader(self.connection, DRAIN)
        while self._unread > 0 and (got := len(rest.read(1 << 16) or b"")):
            self._unread -= got

    def _disconnect(self, exc: Exception) -> None:
        _log.info("%s: %s", self.client_address[0], exc or type(exc).__name__)
        self.close_connection = True
