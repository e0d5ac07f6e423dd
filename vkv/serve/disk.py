"""Load the longest stored prefix of a prompt, and store finished prompts, for a server."""

from __future__ import annotations

import logging
import os
import weakref
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from vkv.caches.checkpoints.record import checkpoints_of
from vkv.caches.kinds.live import ADAPTERS, kind_of, shortest
from vkv.identity import of_model, token_bytes
from vkv.serve.writer import Job, Writer
from vkv.store import Hit, PromptStore
from vkv.store.local.prefix_tree import WIDTH

if TYPE_CHECKING:
    from vkv.caches.saving.request import CodecSpec, Progress

#: Least tokens that loading or storing a prompt must save: fewer are as fast to compute again.
MIN_TOKENS = 128

_log = logging.getLogger("vkv.serve")


class Models(Protocol):
    """Name the attributes of mlx_lm.server's ``ModelProvider`` that are read here."""

    model: Any
    tokenizer: Any
    draft_model: Any
    model_key: Any


class Disk:
    """Give the generation thread a store; ``get`` and ``offer`` never raise.

    Reads and writes use separate connections to the index, so that a hit does not wait
    for a file that is being written.

    Args:
        root: As ``PromptStore`` takes it.
        max_bytes: As ``PromptStore`` takes it.
        min_tokens: Load a prefix only if it is this many tokens longer than the one in
            memory; store a prompt only if it is this many tokens longer than what is
            stored.
        codec: As ``vkv.save`` takes it.
        write: Store finished prompts; ``False`` only reads.
        kv_bits: Bits of the server's own cache quantization, in which case stored
            caches of mlx-lm's QuantizedKVCache can be used.

    Raises:
        VkvError: If ``max_bytes`` is not a size.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: str | int | None = None,
        min_tokens: int = MIN_TOKENS,
        codec: CodecSpec = "raw",
        write: bool = True,
        kv_bits: int | None = None,
    ):
        self.store = PromptStore(root, max_bytes=max_bytes)
        self._into = PromptStore(root, max_bytes=max_bytes)
        self._min, self._codec, self._kv_bits = min_tokens, codec, kv_bits
        self._owner: tuple[weakref.ref[Any], bytes] | None = None
        self._unfit: set[str] = set()
        self._failing = False
        self.writer = Writer(self._write) if write else None

    def get(self, models: Models, tokens: list[int], in_memory: int) -> Hit | None:
        """Return the longest stored prefix, or ``None`` if it saves too few tokens.

        Args:
            models: Provider of the model that will continue the prompt.
            tokens: The whole prompt.
            in_memory: Number of leading tokens whose cache is in memory.
        """
        if len(tokens) - 1 - in_memory < self._min or not _is_storable(tokens, models):
            return None
        try:
            owner = self._id(models.model)
            if self._stored(owner, tokens) - in_memory < self._min:
                return None
            hit = self.store.get(tokens, model=owner)
        except Exception as exc:  # it would end the thread that serves everyone
            self._failed(exc)
            return None
        self._failing = False
        if hit is None or hit.tokens - in_memory < self._min:
            return None
        if not fits(hit.cache, models.model, self._kv_bits):
            self._unfit.add(hit.entry.id)
            _log.warning("%s cannot be used: its caches are of other classes", hit.entry.id)
            return None
        text = "%d of %d prompt tokens loaded from %s%s"
        _log.debug(text, hit.tokens, len(tokens), hit.entry.id[:12], _point(hit))
        return hit

    def offer(self, models: Models, tokens: list[int], cache: list[Any]) -> None:
        """Queue a prompt for storing, if enough of it is new.

        Args:
            models: Provider of the model that filled the cache.
            tokens: The tokens that ``cache`` holds.
            cache: One mlx-lm cache per layer, evaluated; never changed after this call.
        """
        if self.writer is None or len(tokens) < self._min or not _is_storable(tokens, models):
            return
        try:
            owner, data = self._id(models.model), token_bytes(tokens)
            if len(tokens) - self.writer.covers(owner, data) < self._min:
                return
            if len(tokens) - self._stored(owner, tokens) < self._min:
                return
        except Exception as exc:  # as in get
            self._failed(exc)
            return
        label = _label(models.model_key)
        points = tuple(c.tokens for c in checkpoints_of(cache))
        job = Job(owner, data, _trims(cache), cache, models.model, models.tokenizer, label, points)
        self.writer.offer(job)

    def close(self, seconds: float) -> None:
        """Store the prompts that wait, for at most ``seconds``."""
        if self.writer is None:
            return
        waiting = self.writer.waiting()
        _log.info("closing: finishing %d %s…", waiting, "write" if waiting == 1 else "writes")
        if left := self.writer.close(seconds):
            _log.warning("%d prompts could not be written in %g s", left, seconds)
        if self.writer.dropped:
            _log.warning("%d prompts were not stored: too many waited", self.writer.dropped)

    def _stored(self, owner: bytes, tokens: list[int]) -> int:
        match = self.store.find(tokens, model=owner)
        return 0 if match is None or match.entry.id in self._unfit else match.tokens

    def _id(self, model: Any) -> bytes:
        """Return the model's id, computed once per model; keeps no reference to the model."""
        if self._owner is None or self._owner[0]() is not model:
            self._owner = weakref.ref(model), of_model(model)[0].id
        return self._owner[1]

    def _write(self, job: Job, progress: Progress) -> None:
        entry = self._into.put(
            job.cache, memoryview(job.tokens).cast("I").tolist(), model=job.model,
            tokenizer=job.tokenizer, codec=self._codec, metadata=job.metadata, progress=progress,
        )  # fmt: skip
        _log.info("%d tokens stored as %s", len(job.tokens) // WIDTH, entry.id[:12])

    def _failed(self, exc: Exception) -> None:
        level = logging.DEBUG if self._failing else logging.WARNING
        _log.log(level, "serving without the store: %s", exc or type(exc).__name__)
        self._failing = True


def _point(hit: Hit) -> str:
    """Name the checkpoint that a prompt went back to, if it did."""
    if not any(c.tokens == hit.tokens for c in checkpoints_of(hit.cache)):
        return ""
    return f", checkpoint after {hit.tokens} of its {hit.entry.tokens} tokens"


def fits(cache: list[Any], model: Any, kv_bits: int | None = None) -> bool:
    """Return True if loaded caches have the classes that the server makes for ``model``."""
    from mlx_lm.models.cache import make_prompt_cache

    fresh = make_prompt_cache(model)
    return len(cache) == len(fresh) and all(
        _alike(a, b, kv_bits) for a, b in zip(cache, fresh, strict=True)
    )


def _alike(cache: Any, fresh: Any, kv_bits: int | None) -> bool:
    own, wanted = kind_of(cache), kind_of(fresh)
    if own is None or wanted is None:
        return type(cache) is type(fresh)
    if own is not wanted:  # the server quantizes its KVCaches itself
        codes = own.content == "codes" and wanted.name in own.stands_for
        return codes and cache.bits == kv_bits
    adapter = ADAPTERS[own.name]
    a, b = adapter.scalars(cache), adapter.scalars(fresh)
    pairs = list(zip_longest(adapter.children(cache), adapter.children(fresh)))
    return all(a[name] == b[name] for name in own.constants) and all(
        _alike(x, y, None) for x, y in pairs
    )


def _trims(cache: list[Any]) -> bool:
    return all(shortest(c) == 0 for c in cache)


def _is_storable(tokens: list[int], models: Models) -> bool:
    """Return True for a prompt of text alone, computed by one model.

    mlx-lm writes images as negative ids, and appends the caches of a draft model to the
    model's own.
    """
    return models.model is not None and models.draft_model is None and min(tokens) >= 0


def _label(key: Any) -> dict[str, str]:
    """Make the metadata that ``vkv save`` writes, from (model, adapter, draft model)."""
    return {
        name: str(value)
        for name, value in zip(("model", "adapter_path"), key, strict=False)
        if value
    }
