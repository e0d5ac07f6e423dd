"""HTTP: mlx_lm.server's handler behind checks, with errors as the OpenAI API has them."""

from __future__ import annotations

import io
import json
import logging
import threading
from typing import Any
from urllib.parse import unquote, urlsplit

from mlx_lm.server import APIHandler

from vkv.serve import request

_log = logging.getLogger("vkv.serve")
_CHAT = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}


class Handler(APIHandler):  # type: ignore[misc]  # mlx-lm has no types
    """One connection; takes what ``APIHandler`` takes.

    An error of mlx-lm's is held back (``_held``) and said anew: it has its text as a
    string, and its status is always 404.
    """

    path: str
    rfile: Any
    wfile: Any
    response_generator: Any
    _held: io.BytesIO | None = None
    _began = False

    def do_POST(self) -> None:  # noqa: N802
        """A completion, or an error with a body."""
        self.server.underway.add(threading.current_thread())
        try:
            self._complete()
        except request.RequestError as exc:
            self._refuse(exc)
        except ConnectionError:  # the client has gone
            raise
        except Exception as exc:  # of mlx-lm, after it was begun
            _log.warning("a request failed: %s", exc or type(exc).__name__, exc_info=True)
            self._refuse(request.RequestError(f"{type(exc).__name__}: {exc}", status=500))
        finally:
            self.server.underway.discard(threading.current_thread())

    def _complete(self) -> None:
        path = urlsplit(self.path).path
        if path not in _CHAT:
            raise request.RequestError(f"nothing is at {path}", status=404)
        size = request.length(self.headers["Content-Length"])
        data = self.rfile.read(size)
        if len(data) < size:
            raise request.RequestError(f"a body of {len(data)} bytes, Content-Length is {size}")
        data = json.dumps(request.parsed(data, chat=_CHAT[path])).encode()
        self.path, self.rfile = path, io.BytesIO(data)
        self.headers.replace_header("Content-Length", str(len(data)))
        self.response_generator = asked = _Asked(self.response_generator)
        wire = self.wfile
        try:
            super().do_POST()
        finally:
            self.wfile = wire
        if self._held is not None:
            raise asked.error or request.RequestError(_text(self._held.getvalue()))

    def validate_model_parameters(self) -> None:
        """Types and ranges as mlx-lm has them; its 0.31 lets the error escape."""
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError) as exc:
            raise request.RequestError(str(exc)) from exc

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if status_code < 400:
            super()._set_completion_headers(status_code)
            return
        self._headers_buffer: list[bytes] = []
        self._held = self.wfile = io.BytesIO()

    def end_headers(self) -> None:
        """From here on the status is said."""
        self._began = self._began or self._held is None
        super().end_headers()

    def _refuse(self, error: request.RequestError) -> None:
        """Answer with an error; where the answer has begun, as its last event."""
        self._held = None
        body = json.dumps(error.to_dict()).encode()
        if self._began:
            self.wfile.write(b"data: " + body + b"\n\n")
            return
        self._headers_buffer = []
        self._answer(error.status, body)

    def _answer(self, status: int, body: bytes) -> None:
        super()._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def do_GET(self) -> None:  # noqa: N802
        """``/health``, ``/v1/models`` and ``/v1/models/NAME``."""
        path = urlsplit(self.path).path
        if path == "/health":
            failed = self.response_generator.failed
            status = {"status": "unavailable" if failed else "ok"}
            self._answer(503 if failed else 200, json.dumps(status).encode())
        elif path.rstrip("/") == "/v1/models":
            found = {"object": "list", "data": self._models()}
            self._answer(200, json.dumps(found).encode())
        elif path.startswith("/v1/models/"):
            self._model(unquote(path.removeprefix("/v1/models/")))
        else:
            self._refuse(request.RequestError(f"nothing is at {path}", status=404))

    def _model(self, name: str) -> None:
        for model in self._models():
            if model["id"] == name:
                self._answer(200, json.dumps(model).encode())
                return
        text = f"no model {name!r} is here"
        self._refuse(request.RequestError(text, "model", status=404, code="model_not_found"))

    def _models(self) -> list[dict[str, Any]]:
        """What is served, by each of its names, then what mlx-lm finds in the hub's cache."""
        names = [*self.response_generator.model_provider.names]
        names += [name for name in self._downloaded() if name not in names]
        about = {"object": "model", "created": self.created, "owned_by": "vkv"}
        return [{"id": name, **about} for name in names]

    def _downloaded(self) -> list[str]:
        wire, self.wfile, self.path = self.wfile, io.BytesIO(), "/v1/models"
        try:
            self.handle_models_request()
            found = json.loads(self.wfile.getvalue().partition(b"\r\n\r\n")[2])
            return [model["id"] for model in found["data"]]
        except Exception as exc:  # there is no cache directory
            _log.debug("the hub's cache cannot be listed: %s", exc)
            return []
        finally:
            self.wfile = wire
            self._headers_buffer = []
            self._began = False


class _Asked:
    """A generator that keeps the error that it raised, of which mlx-lm keeps the text."""

    def __init__(self, generator: Any):
        self._generator = generator
        self.error: request.RequestError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, *args: Any, **options: Any) -> Any:
        try:
            return self._generator.generate(*args, **options)
        except request.RequestError as exc:
            self.error = exc
            raise
        except Exception as exc:
            self.error = request.RequestError(f"{type(exc).__name__}: {exc}")
            raise


def _text(held: bytes) -> str:
    """What mlx-lm would have said."""
    body = held.partition(b"\r\n\r\n")[2] or held
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the request was refused"
