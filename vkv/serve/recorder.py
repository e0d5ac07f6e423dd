"""Keep what is to be said of a request: its error, or its tokens and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vkv.serve.request_error import RequestError

if TYPE_CHECKING:
    from vkv.serve.served_model import ServedModel


class ErrorRecorder:
    """Stand between mlx_lm.server's handler and the model, for one request.

    Args:
        model: The model that answers.
        hides: Tell the progress of a prompt without numbers, which begin at the cached
            tokens.

    Attributes:
        error: The exception that ended the request, if one did before its answer began.
        prompt: Tokens of the prompt.
        cached: Those of them that were not computed again.
        generated: Tokens of the answer so far.
        first: Seconds from the request to its first token.
    """

    def __init__(self, model: ServedModel, hides: bool):
        self._model, self._hides = model, hides
        self.cli_args = model.cli_args
        self.error: Exception | None = None
        self.prompt = self.cached = self.generated = 0
        self.first = 0.0
        self._start = time.monotonic()

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], object]
    ) -> Any:
        """Generate as ``ResponseGenerator.generate``; record the error and raise it."""

        def progress(done: int, total: int) -> None:
            progress_callback(*((0, 0) if self._hides else (done, total)))

        try:
            context, answer = self._model.generate(request, args, progress)
        except (RequestError, ConnectionError) as exc:
            self.error = exc
            raise
        except Exception as exc:
            self.error = RequestError(f"{type(exc).__name__}: {exc}")
            raise
        self.prompt, self.cached = len(context.prompt), context.prompt_cache_count
        return context, self._counted(answer)

    def _counted(self, answer: Iterator[Any]) -> Iterator[Any]:
        for item in answer:
            if not self.generated:
                self.first = time.monotonic() - self._start
            self.generated += 1
            yield item

    def summary(self) -> str:
        """Return one line for the log, like ``2,452 tokens, 2,451 cached, first token 0.6 s``."""
        return (
            f"{self.prompt:,} tokens, {self.cached:,} cached, first token {self.first:.1f} s, "
            f"{self.generated:,} generated"
        )
