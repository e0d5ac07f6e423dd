"""Keep the error that ends a request, of which mlx_lm.server keeps the text only."""

from __future__ import annotations

from collections.abc import Callable
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
    """

    def __init__(self, model: ServedModel, hides: bool):
        self._model, self._hides = model, hides
        self.cli_args = model.cli_args
        self.error: Exception | None = None

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], object]
    ) -> Any:
        """Generate as ``ResponseGenerator.generate``; record the error and raise it."""

        def progress(done: int, total: int) -> None:
            progress_callback(*((0, 0) if self._hides else (done, total)))

        try:
            return self._model.generate(request, args, progress)
        except (RequestError, ConnectionError) as exc:
            self.error = exc
            raise
        except Exception as exc:
            self.error = RequestError(f"{type(exc).__name__}: {exc}")
            raise
