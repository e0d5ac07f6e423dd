"""The server: mlx_lm.server's handler and generator around ``StoredPrompts``."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from vkv.errors import VkvError
from vkv.serve import upstream
from vkv.serve.disk import Disk
from vkv.serve.prompts import StoredPrompts

#: Seconds that ``close`` gives to prompts that wait to be written.
FLUSH = 30.0

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

    def start(self) -> None:
        """Load the model, then serve in threads of its own.

        Raises:
            Exception: What mlx-lm raised when it loaded the model.
        """
        from mlx_lm.models.cache import LRUPromptCache
        from mlx_lm.server import ResponseGenerator

        upstream.wire_memory()
        models = _models(self._args)
        limit = self._args.prompt_cache_bytes
        options = {} if limit is None else {"max_bytes": limit}
        memory = LRUPromptCache(self._args.prompt_cache_size, **options)
        self._generator = ResponseGenerator(models, StoredPrompts(memory, models, self.disk))
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
        self.disk.close(seconds)

    def _handle(self, *connection: Any) -> Any:
        from mlx_lm.server import APIHandler

        return APIHandler(self._generator, *connection)


class _Http(ThreadingHTTPServer):
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
    """A ``ModelProvider`` that tells whether the default model could be loaded."""
    from mlx_lm.server import ModelProvider

    class Models(ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
        def __init__(self, args: argparse.Namespace):
            super().__init__(args)
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

    return Models(args)
