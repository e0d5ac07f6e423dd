"""mlx_lm.server's generator, with a last look at each prompt and a word to all when it ends."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from queue import Queue
from threading import Lock
from typing import Any

from mlx_lm.server import ResponseGenerator

from vkv.serve.request import RequestError

_log = logging.getLogger("vkv.serve")


class Requests(Queue):  # type: ignore[type-arg]
    """Requests for the generator, as (queue of answers, …), which can all be refused."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._error: Exception | None = None
        self._waiting: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Hand a request over; once ``fail`` was called it is refused."""
        with self._lock:
            self._waiting.add(item[0])
            if self._error is not None:
                item[0].put(self._error)
                return
        super().put(item, block, timeout)

    def fail(self, error: Exception) -> None:
        """Answer all who wait, and all who will ask, with an error."""
        with self._lock:
            self._error = error
            for answers in self._waiting:
                answers.put(error)


class Generator(ResponseGenerator):  # type: ignore[misc]  # mlx-lm has no types
    """Serves requests in a thread of its own.

    Args:
        models: A ``ModelProvider``.
        prompts: A prompt cache.
        died: Called, in that thread, when an error ends it.

    Attributes:
        failed: Whether an error ended it.
    """

    def __init__(self, models: Any, prompts: Any, died: Callable[[], object]):
        self._died, self.failed = died, False
        self._asked = Requests()
        super().__init__(models, prompts)
        self.requests = self._asked

    def _generate(self) -> None:
        try:
            super()._generate()
        except Exception as exc:  # a fault of mlx-lm or of vkv: no request can be served
            _log.exception("the thread that generates died")
            self.failed = True
            self._asked.fail(RequestError(f"generation failed: {exc}", status=500))
            self._died()
        else:
            self._asked.fail(RequestError("the server is being stopped", status=503))

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Errors here are answered; later ones, in a batch, would end the thread."""
        found = super()._tokenize(tokenizer, request, args)
        if not found[0]:
            raise RequestError("the prompt has no tokens")
        if args.sampling.top_k >= tokenizer.vocab_size:
            args.sampling.top_k = 0  # all tokens, which 0 stands for
        if bias := args.logits.logit_bias:
            known = max(tokenizer.get_vocab().values())
            if max(bias) > known:  # MLX does not look, and writes there
                text = f"token {max(bias)}, the vocabulary ends at {known}"
                raise RequestError(text, "logit_bias")
        return found
