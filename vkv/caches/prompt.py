"""A loaded prompt: its live cache, its tokens, and what is left of a new prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vkv import identity
from vkv.caches.kinds.live import cut
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
        cut(self.cache, keep, len(self.tokens))
        self.tokens = self.tokens[:keep]
        return ids[keep:]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of leading items that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
