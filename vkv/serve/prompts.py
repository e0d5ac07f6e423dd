"""Extend mlx-lm's in-memory prompt cache by a store on disk."""

from __future__ import annotations

import copy
import threading
from typing import Any

import mlx.core as mx

from vkv.serve.disk import Disk, Models
from vkv.serve.read_points import MESSAGE, ReadPoints


class StoredPrompts:
    """Replace an ``LRUPromptCache``, for any number of threads that generate.

    Args:
        memory: The ``LRUPromptCache``; it answers all methods that are not defined here.
        models: The server's ``ModelProvider``.
        disk: The store.
    """

    def __init__(self, memory: Any, models: Models, disk: Disk):
        self._memory, self._models, self._disk = memory, models, disk
        self._lock, self._points = threading.Lock(), ReadPoints()

    def __len__(self) -> int:
        return len(self._memory)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._memory, name)
        return self._locked(value) if callable(value) else value

    def _locked(self, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                return method(*args, **options)

        return call

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """Return the longest prefix of a prompt that is in memory or worth loading.

        Args:
            model: mlx-lm's key of the model.
            tokens: The whole prompt.

        Returns:
            A cache that the caller may change, or ``None``; and the tokens left to
            compute, at least one.
        """
        cache, rest = self._in_memory(model, tokens)
        hit = self._disk.get(self._models, tokens, in_memory=len(tokens) - len(rest))
        if hit is None:
            return cache, rest
        mx.eval([c.state for c in hit.cache])  # another thread may use it next
        cache = self._points.detached(hit.cache)
        with self._lock:
            self._memory.insert_cache(model, tokens[: hit.tokens], cache)
        return copy.deepcopy(cache), hit.rest

    def _in_memory(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        with self._lock:
            cache, rest = self._memory.fetch_nearest_cache(model, tokens)
            if rest or len(tokens) < 2:
                return (cache, rest) if rest else (None, tokens)
            # The prompt equals an entry: without a token to compute there are no logits.
            cache, rest = self._memory.fetch_nearest_cache(model, tokens[:-1])
            return cache, [*rest, tokens[-1]]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any
    ) -> None:
        """Keep a prompt in memory, and queue it for storing if enough of it is new.

        Args:
            model: mlx-lm's key of the model.
            tokens: The tokens that ``prompt_cache`` holds.
            prompt_cache: One cache per layer; never changed after this call.
            options: As ``LRUPromptCache.insert_cache`` takes them. Where the prompt is one
                that ends with a message, a checkpoint is all that is kept of it.
        """
        kind = options.get("cache_type")
        if kind in (MESSAGE, "system"):
            self._points.take(tokens, prompt_cache)
        if kind == MESSAGE:
            return
        mx.eval([c.state for c in prompt_cache])  # another thread may use it next
        with self._lock:
            self._memory.insert_cache(model, tokens, prompt_cache, **options)
        self._disk.offer(self._models, tokens, self._points.attached(tokens, prompt_cache))
