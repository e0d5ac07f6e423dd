"""The server: mlx_lm.server's handler and generator around ``StoredPrompts``."""

from __future__ import annotations

import argparse
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vkv.errors import VkvError
from vkv.serve import upstream
from vkv.serve.disk import Disk
from vkv.serve.prompts import StoredPrompts
from vkv.serve.request import RequestError

#: Seconds that ``close`` gives to prompts that wait to be written.
FLUSH = 30.0
#: And to answers that are being sent.
ANSWERS = 2.0

#: What may be a name on the hub.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_log = logging.getLogger("vkv.serve")


class Server:
    """mlx_lm.server over a store.

    Args:
        args: As ``upstream.arguments`` makes them. Port 0 takes a free one.
        disk: The store; closed with the server.

    Raises:
        VkvError: The address cannot be listened on.
    """

    def __init__(self, args: argparse.Namespace, disk: Disk):
        self._args, self.disk = args, disk
        try:
            self._http = _listen(args.host, args.port, self._handle)
        except BaseException:
            disk.close(0)
            raise
        self._accept = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="vkv-http"
        )
        self._generator: Any = None

    @property
    def url(self) -> str:
        """Where the API is."""
        host, port = (str(x) for x in self._http.server_address[:2])
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    @property
    def failed(self) -> bool:
        """Whether generation ended by an error; then no request can be served."""
        return self._generator is not None and bool(self._generator.failed)

    def start(self, died: Callable[[], object] = lambda: None) -> None:
        """Load the model, then serve in threads of its own.

        Args:
            died: Called when ``failed`` becomes true, in another thread.

        Raises:
            Exception: What mlx-lm raised when it loaded the model.
        """
        from mlx_lm.models.cache import LRUPromptCache

        from vkv.serve.generator import Generator

        upstream.wire_memory()
        models = _models(self._args)
        limit = self._args.prompt_cache_bytes
        options = {} if limit is None else {"max_bytes": limit}
        memory = LRUPromptCache(self._args.prompt_cache_size, **options)
        self._generator = Generator(models, StoredPrompts(memory, models, self.disk), died)
        models.tried.wait()
        if models.error is not None:
            raise models.error
        self._accept.start()

    def close(self, seconds: float = FLUSH) -> None:
        """Take no more requests, end those that run, and write what waits.

        Args:
            seconds: At most so long for writing.
        """
        if self._accept.ident is not None:
            self._http.shutdown()
            self._accept.join()
        self._http.server_close()
        if self._generator is not None:
            self._generator.stop_and_join()
        until = time.monotonic() + ANSWERS
        for thread in list(self._http.underway):
            thread.join(max(0.0, until - time.monotonic()))
        self.disk.close(seconds)

    def _handle(self, *connection: Any) -> Any:
        from vkv.serve.handler import Handler

        return Handler(self._generator, *connection)


class _Http(ThreadingHTTPServer):
    """Knows, in ``underway``, the threads that answer."""

    def __init__(self, *args: Any):
        self.underway: set[threading.Thread] = set()
        super().__init__(*args)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line: most often the client has gone, or the server is being closed."""
        exc = sys.exception()
        _log.warning("a request of %s failed: %s", client_address[0], exc or type(exc).__name__)


def _listen(host: str, port: int, handle: Any) -> _Http:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        cls = type("_Http", (_Http,), {"address_family": family})
        http: _Http = cls(address, handle)
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise VkvError(f"cannot listen on {host}:{port}: {reason}") from exc
    return http


def _models(args: argparse.Namespace) -> Any:
    """A ``ModelProvider`` that tells whether the default model could be loaded.

    ``names`` are those that requests may call it by.
    """
    from mlx_lm.server import ModelProvider

    class Models(ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
        def __init__(self, args: argparse.Namespace):
            super().__init__(args)
            self.names = [*dict.fromkeys((args.model, Path(args.model).name, "default_model"))]
            self.tried = threading.Event()
            self.error: Exception | None = None

        def load_default(self) -> None:
            """In the thread that generates, where MLX's work is bound to."""
            try:
                super().load_default()
            except Exception as exc:  # any of mlx-lm, transformers, the hub; ``start`` tells
                self.error = exc
            finally:
                self.tried.set()

        def load(self, model: str, *others: str | None) -> Any:
            """By any name; another model as mlx-lm loads it, in place of the one before."""
            if model in self.names:
                return super().load("default_model", *others)
            try:
                here = (Path(model) / "config.json").is_file() and model != ""
                if not (here or _REPOSITORY.fullmatch(model)):
                    raise FileNotFoundError("no such directory")  # the one before stays
                return super().load(model, *others)
            except Exception as exc:  # as above
                text = f"cannot load model {model[:200]!r} ({type(exc).__name__}); served is "
                raise RequestError(
                    text + repr(self.names[0]), "model", status=404, code="model_not_found"
                ) from exc

    return Models(args)
