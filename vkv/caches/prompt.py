"""A loaded prompt: its live cache, its tokens, and what is left of a new prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vkv import identity
from vkv.errors import CacheError
from vkv.format.info import Info


@dataclass(slots=True, repr=False)
class Prompt:
    """What ``vkv.load`` returns.

    Attributes:
        cache: One mlx-lm cache per layer, to be passed on as ``prompt_cache``.
        tokens: The ids the cache holds; ``None`` if the file does not say.
        info: The file, as ``vkv.inspect`` tells it.
    """

    cache: list[Any]
    tokens: list[int] | None
    info: Info

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.cache)} caches from {self.info!r}>"

    def resume(self, tokens: Any) -> list[int]:
        """Fit the cache to a new prompt and return the tokens still to be computed.

        The cache is trimmed, in place, to the longest common prefix, and to one
        token less than ``tokens`` at most: without a token to compute there are no
        logits. Either all layers are trimmed or none.

        Args:
            tokens: The whole new prompt, as ``vkv.save`` takes ids.

        Returns:
            The rest of ``tokens``; at least one id.

        Raises:
            CacheError: The file holds no tokens, ``tokens`` is empty, or a layer
                cannot go back so far (recurrent, or a ring that has wrapped) (L8).
            VkvError: ``tokens`` are no token ids (I2).
        """
        if self.tokens is None:
            raise CacheError(
                "the file holds no token ids, so no prompt can be matched; "
                "`vkv convert --model … --prompt …` adds them",
                rule="L8",
            )
        ids = memoryview(identity.token_bytes(tokens)).cast("I").tolist()
        if not ids:
            raise CacheError("an empty prompt: there is nothing to compute", rule="L8")
        keep = min(common_prefix(self.tokens, ids), len(ids) - 1)
        trim(self.cache, len(self.tokens) - keep)
        self.tokens = self.tokens[:keep]
        return ids[keep:]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of leading items that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def trim(cache: Sequence[Any], count: int) -> None:
    """Drop the last ``count`` tokens of every layer, or of none.

    Raises:
        CacheError: A layer cannot be trimmed so far; its path and why (L8).
    """
    if count == 0:
        return
    for i, layer in enumerate(cache):
        if reason := _stuck(layer, count):
            raise CacheError(
                f"cannot drop the last {count} tokens: {reason}; only the exact prompt, continued, "
                "can use this cache",
                rule="L8",
                at=f"layers[{i}]",
            )
    for layer in cache:
        _trim(layer, count)


def _stuck(cache: Any, count: int) -> str | None:
    name = type(cache).__name__
    if name == "CacheList":
        return next((r for c in cache.caches if (r := _stuck(c, count))), None)
    if not cache.is_trimmable():
        return f"a {name} holds only its present state"
    held = cache.offset - getattr(cache, "start_position", 0)
    return f"a {name} holds {held}" if count > held else None


def _trim(cache: Any, count: int) -> None:
    if type(cache).__name__ == "CacheList":
        for child in cache.caches:
            _trim(child, count)
        return
    cache.trim(count)
    if type(cache).__name__ == "ConcatenateKVCache":
        # It appends behind all it holds, also behind what was trimmed off.
        cache.keys, cache.values = (x[..., : cache.offset, :] for x in (cache.keys, cache.values))
