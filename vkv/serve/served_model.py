"""Hold one served model with the threads that generate from it."""

from __future__ import annotations

import argparse
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.server import ModelProvider

from vkv.serve.answers import Client
from vkv.serve.completion import ModelLimits
from vkv.serve.disk import Disk
from vkv.serve.generator import Generator, Request
from vkv.serve.large import LARGE, LargeRequests
from vkv.serve.prompts import StoredPrompts

#: Tokens of a prompt and its answer, for a model that does not say what it was made for.
CONTEXT = 1 << 20


class Models(ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
    """Load one model and never another.

    Attributes:
        tried: Set once loading has ended, well or not.
        error: The exception that ended it, if one did.
        limits: What the model allows requests to say, once loaded.
    """

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.tried = threading.Event()
        self.error: Exception | None = None
        self.limits = ModelLimits(0, 0, False)

    def load(self, *_: Any) -> Any:
        """Return the model and its tokenizer; mlx-lm 0.31 forgets the adapter by itself."""
        return super().load("default_model", self.cli_args.adapter_path, "default_model")

    def load_default(self) -> None:
        """Load the model in the generation thread, which MLX binds its work to."""
        try:
            super().load_default()
            images = getattr(self, "processor", None) is not None
            context = self.cli_args.max_context or _context(self.model)
            self.limits = ModelLimits(_vocabulary(self.model, self.tokenizer), context, images)
        except Exception as exc:  # any of mlx-lm, transformers, the hub; ``wait`` raises it
            self.error = exc
        finally:
            self.tried.set()


class SharedModels:
    """Offer the model that another provider has loaded, for requests served one by one."""

    is_batchable = False

    def __init__(self, models: Models):
        self.cli_args, self.model_key = models.cli_args, models.model_key
        self.limits = models.limits
        self.model, self.tokenizer = models.model, models.tokenizer
        self.processor, self.draft_model = getattr(models, "processor", None), None

    def load(self, *_: Any) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        return self.model, self.tokenizer

    def load_default(self) -> None:
        """Do nothing: the model is loaded."""

    def reset(self) -> None:
        """Drop the references to the model."""
        self.model = self.tokenizer = self.processor = None


class ServedModel:
    """Generate from one model.

    mlx-lm batches requests, but serves one with a seed alone, and would make all others
    wait for its whole answer. Those have a thread of their own: MLX has one random state
    for each thread.

    Args:
        args: Flags of the server, with this model.
        disk: The store.
        large: Tokenizes large requests.
        died: Called when generation has ended for good.

    Attributes:
        names: Names that requests may use for it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        disk: Disk,
        large: LargeRequests,
        died: Callable[[], object],
    ):
        from mlx_lm.models.cache import LRUPromptCache

        self.cli_args, self._disk, self._died = args, disk, died
        self.names = [*dict.fromkeys((args.model, Path(args.model).name))]
        self.models = Models(args)
        limit = args.prompt_cache_bytes
        memory = LRUPromptCache(
            args.prompt_cache_size, **({} if limit is None else {"max_bytes": limit})
        )
        self._prompts = StoredPrompts(memory, self.models, disk)
        self._lock = threading.Lock()
        self._large = large
        self._tokenizer: Any = None
        self._generators = [Generator(self.models, self._prompts, died)]

    def wait(self) -> None:
        """Wait until the model is loaded.

        Raises:
            Exception: What mlx-lm raised when it loaded the model.
        """
        self.models.tried.wait()
        if self.models.error is not None:
            raise self.models.error

    @property
    def limits(self) -> ModelLimits:
        """Return what the model allows requests to say."""
        return self.models.limits

    @property
    def failed(self) -> bool:
        """True once faults have ended generation; then no request can be served."""
        return any(generator.failed for generator in self._generators)

    def generate(self, request: Request, args: Any, progress_callback: Any = None) -> Any:
        """Queue a request; as ``ResponseGenerator.generate``."""
        if args.sampling.temperature == 0:
            args.seed = None  # nothing is random, so it can join the batch
        generator = self._generators[0]
        if request.nbytes > LARGE and not request.images:
            self._large.run(request.nbytes, self._tokenize, request, args)
        if args.seed is not None and self.models.is_batchable:
            generator = self._seeded()
        return generator.generate(request, args, progress_callback)

    def _tokenize(self, request: Request, args: Any) -> None:
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.models.tokenizer)
        self._generators[0].tokenize(self._tokenizer, request, args)

    def _seeded(self) -> Generator:
        with self._lock:
            if len(self._generators) == 1:
                shared = SharedModels(self.models)
                self._generators.append(Generator(shared, self._prompts, self._died))
            return self._generators[1]

    def cancel(self, client: Client, error: Exception) -> None:
        """Cancel the requests of one client."""
        for generator in self._generators:
            generator.cancel(client, error)

    def stop(self) -> None:
        """Cancel all requests, and let the threads end."""
        with self._lock:
            for generator in self._generators:
                generator.stop()

    def join(self, seconds: float) -> bool:
        """Wait for each thread to end; return False if one still runs."""
        ended = [generator.join(seconds) for generator in self._generators]
        return all(ended)


def _context(model: Any) -> int:
    """Return the tokens that the model was made for, or ``CONTEXT`` if it does not say."""
    args = getattr(model, "args", None)
    for config in (args, getattr(args, "text_config", None)):
        values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        length = values.get("max_position_embeddings")
        if isinstance(length, int) and length > 1:
            return length
    return CONTEXT


def _vocabulary(model: Any, tokenizer: Any) -> int:
    """Return the number of logits; MLX knows their shape before it computes them."""
    try:
        return int(model(mx.zeros((1, 1), mx.int32)).shape[-1])
    except Exception:  # a model that wants other arguments
        return 1 + int(max(tokenizer.get_vocab().values()))
