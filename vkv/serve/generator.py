"""Run mlx_lm.server's generation thread so that no request ends it, delays a stop, or stays."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import CompletionRequest, ResponseGenerator

from vkv.serve.answers import Client, Requests
from vkv.serve.read_points import divided
from vkv.serve.request_error import RequestError

#: The server ends when this many faults of the generation thread fall within ``WITHIN``.
MAX_FAULTS = 4
WITHIN = 60.0  # seconds

_log = logging.getLogger("vkv.serve")


@dataclass
class Request(CompletionRequest):  # type: ignore[misc]  # mlx-lm has no types
    """Add to mlx_lm.server's request who asks, and its tokens if they are known.

    Args:
        client: Who asks.
        nbytes: Size of the body.
        images: True if it has images.
        tokenized: Result of ``Generator.tokenize``.
    """

    client: Client | None = None
    nbytes: int = 0
    images: bool = False
    tokenized: Any = None


class Generator(ResponseGenerator):  # type: ignore[misc]
    """Serve requests in a thread of its own.

    A fault in that thread fails the requests that it was computing, then the thread
    goes on; repeated faults end it.

    Args:
        models: A ``ModelProvider``.
        prompts: A prompt cache.
        died: Called in that thread when repeated faults end it.

    Attributes:
        failed: True once repeated faults have ended the thread.
    """

    def __init__(self, models: Any, prompts: Any, died: Callable[[], object]):
        self._died, self.failed = died, False
        self._queue = Requests()
        self._faults: deque[float] = deque(maxlen=MAX_FAULTS)
        super().__init__(models, prompts)
        self.requests = self._queue

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        """Queue a request; all names of a model are one to mlx-lm, so that they share a batch."""
        args.model.model = args.model.draft = "default_model"
        args.model.adapter = None
        return super().generate(request, args, progress_callback)

    def tokenize(self, tokenizer: Any, request: Request, args: Any) -> None:
        """Tokenize a request in the calling thread, with a tokenizer of its own."""
        tokenized = super()._tokenize(tokenizer, request, args)
        request.tokenized = self._divided(tokenized, tokenizer, request, args)

    def _divided(self, tokenized: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        options = dict(self.model_provider.cli_args.chat_template_args)
        options |= args.chat_template_kwargs or {}
        return divided(tokenized, tokenizer, self.model_provider.model, request, options)

    def cancel(self, client: Client, error: Exception) -> None:
        """Cancel the requests of one client."""
        self._queue.cancel(client, error)

    def stop(self) -> None:
        """Cancel all requests, and let the thread end at its next step."""
        self._stop = True
        self._queue.close(RequestError("the server is being stopped", status=503))

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end; return False if it still runs."""
        self._generation_thread.join(seconds)
        return not self._generation_thread.is_alive()

    def _generate(self) -> None:
        while not self._stop:
            try:
                super()._generate()
            except Exception as exc:  # of mlx-lm, MLX or vkv; other requests go on
                _log.exception("the generation thread failed")
                self._after_fault(RequestError(f"generation failed: {exc}", status=500))
        self._queue.close(RequestError("the server is being stopped", status=503))

    def _after_fault(self, error: RequestError) -> None:
        self._queue.fail(error)
        self._faults.append(time.monotonic())
        if len(self._faults) == MAX_FAULTS and self._faults[-1] - self._faults[0] < WITHIN:
            self._stop = self.failed = True
            self._queue.close(error)
            self._died()

    def _fit(self, tokens: int, args: Any) -> None:
        """Refuse a prompt that leaves no room for an answer; let an answer end at the limit."""
        context = self.model_provider.limits.context
        if tokens >= context:
            raise RequestError(
                f"the prompt has {tokens:,} tokens, expected less than {context:,} (--max-context)",
                code="context_length_exceeded",
            )
        args.max_tokens = min(args.max_tokens, context - tokens)

    def _serve_single(self, request: Any, *more: Any) -> None:
        request[0].alone = True
        super()._serve_single(request, *more)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Raise here, where mlx-lm answers with the error; later ones end a whole batch."""
        tokenized = request.tokenized
        if tokenized is None:
            tokenized = super()._tokenize(tokenizer, request, args)
            tokenized = self._divided(tokenized, tokenizer, request, args)
        if not tokenized[0]:
            raise RequestError("the prompt has no tokens")
        self._fit(len(tokenized[0]), args)
        for word in args.stop_words:
            if not tokenizer.encode(word, add_special_tokens=False):
                raise RequestError(f"the stop word {word[:40]!r} has no tokens", "stop")
        return tokenized
