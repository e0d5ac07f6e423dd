"""Take checkpoints where messages end while mlx-lm reads a prompt, and keep them for the store.

mlx-lm's batches read a prompt in segments, and offer the caches at the end of each. A model
whose caches cannot be cut gets more segments: one to the end of each of the last messages.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from blake3 import blake3

from vkv.caches.checkpoints.cap import SHARE, cache_bytes, within
from vkv.caches.checkpoints.message_ends import message_ends
from vkv.caches.checkpoints.record import (
    Checkpoint,
    CheckpointedCache,
    checkpoints_of,
    lets_go,
    take,
)
from vkv.identity import token_bytes
from vkv.store.local.prefix_tree import WIDTH

#: Type of a segment that ends with a message; mlx-lm's own are system, user and assistant.
MESSAGE = "message"
#: Last messages whose ends are looked for: each costs a run of the template. Ends before those
#: were found when earlier prompts of the conversation were read.
NEWEST = 4
#: Bytes of checkpoints that wait for their prompts to be stored, of one model.
MAX_BYTES = 1 << 30

_log = logging.getLogger("vkv.serve")


def divided(tokenized: Any, tokenizer: Any, model: Any, request: Any, options: Any) -> Any:
    """Return a tokenized request with more segments, for a model whose caches cannot be cut.

    Args:
        tokenized: What mlx-lm made of the request: ids, segments, their types, and more.
        tokenizer: The tokenizer that made it.
        model: The model that will read it.
        request: A ``mlx_lm.server.CompletionRequest``.
        options: Of the chat template.
    """
    from mlx_lm.models.cache import make_prompt_cache

    prompt, segments, types, *more = tokenized
    chat = request.request_type == "chat" and tokenizer.has_chat_template
    if not chat or any(more[1:]) or not lets_go(make_prompt_cache(model)):
        return tokenized
    render = partial(
        tokenizer.apply_chat_template,
        tools=request.tools, tokenize=True, add_generation_prompt=False, **options,
    )  # fmt: skip
    ends = message_ends(prompt, request.messages, render, NEWEST)
    return prompt, *_split(prompt, segments, types, ends), *more


def _split(
    prompt: list[int], segments: list[list[int]], types: list[str], ends: Sequence[int]
) -> tuple[list[list[int]], list[str]]:
    """Split segments where messages end; the type of a segment is that of its end."""
    at, kinds = 0, dict.fromkeys((n for n in ends if n < len(prompt) - 1), MESSAGE)
    for segment, kind in zip(segments, types, strict=True):
        at += len(segment)
        kinds[at] = kind
    bounds = sorted(kinds)
    starts = [0, *bounds[:-1]]
    return [prompt[a:b] for a, b in zip(starts, bounds, strict=True)], [kinds[n] for n in bounds]


class ReadPoints:
    """Hold checkpoints of prompts that were read, until the prompts are stored.

    For any number of threads. The oldest go when there are too many bytes.

    Args:
        max_bytes: Most bytes of all.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes, self._bytes = max_bytes, 0
        self._found: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, tokens: list[int], cache: Sequence[Any]) -> None:
        """Take a checkpoint where a message ends; a cache that cannot be taken is left out."""
        try:
            if lets_go(cache):
                self.add([take(cache, len(tokens), message=True, ids=tokens)])
        except Exception as exc:  # it would end the thread that serves everyone
            _log.warning("no checkpoint is kept: %s", exc or type(exc).__name__)

    def add(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Keep checkpoints whose tokens are known."""
        with self._lock:
            for checkpoint in checkpoints:
                if checkpoint.digest is None:
                    continue
                if old := self._found.pop(checkpoint.digest, None):
                    self._bytes -= old.nbytes
                self._found[checkpoint.digest] = checkpoint
                self._bytes += checkpoint.nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._found.popitem(last=False)[1].nbytes

    def of(self, tokens: list[int]) -> list[Checkpoint]:
        """Return the checkpoints of a prompt with these ids, ascending."""
        with self._lock:
            known = list(self._found.values())
        if not known or min(tokens, default=-1) < 0:  # mlx-lm writes images as negative ids
            return []
        data, counts = token_bytes(tokens), {c.tokens for c in known if c.tokens < len(tokens)}
        digests = {n: blake3(data[: n * WIDTH]).digest() for n in counts}
        fitting = [c for c in known if digests.get(c.tokens) == c.digest]
        return sorted(fitting, key=lambda c: c.tokens)

    def attached(self, tokens: list[int], cache: list[Any]) -> list[Any]:
        """Return a cache that carries its checkpoints, as many as are worth their bytes."""
        found = self.of(tokens)
        if not found:
            return cache
        return CheckpointedCache(cache, within(found, SHARE, cache_bytes(cache)))

    def detached(self, cache: list[Any]) -> list[Any]:
        """Return a plain list of caches; their checkpoints are kept here."""
        self.add(checkpoints_of(cache))
        return list(cache)
