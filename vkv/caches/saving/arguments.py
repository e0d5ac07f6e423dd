"""Read the caches that a caller gives, in the forms people have them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkv.caches.prompt import Prompt
from vkv.errors import CacheError


def caches_and_tokens(cache: Any, tokens: Any) -> tuple[list[Any], Any]:
    """Return one cache per layer, and the token ids they hold.

    Args:
        cache: A list of mlx-lm caches, or a ``Prompt``, whose tokens are used where
            ``tokens`` is ``None``.
        tokens: Token ids, or ``None``.

    Raises:
        CacheError: Neither of them, or no cache at all (L1).
    """
    if isinstance(cache, Prompt):
        return caches_and_tokens(cache.cache, cache.settled() if tokens is None else tokens)
    if not isinstance(cache, Sequence) or isinstance(cache, str | bytes):
        found = type(cache).__name__
        raise CacheError(
            f"a {found}, expected a list with one mlx-lm cache per layer (as "
            "mlx_lm.models.cache.make_prompt_cache makes it), or a vkv.Prompt",
            rule="L1",
            at="cache",
        )
    if not cache:
        raise CacheError("an empty list, expected one cache per layer", rule="L1", at="cache")
    return cache if isinstance(cache, list) else list(cache), tokens
