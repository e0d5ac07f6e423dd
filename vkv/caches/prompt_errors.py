"""Errors of ``Prompt``: what was found, what was expected, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vkv.errors import CacheError


def unrelated(shared: int, held: int, at_least: int) -> CacheError:
    """Return the error for a prompt that shares too few leading tokens with the cache."""
    return CacheError(
        f"the prompt shares {shared} leading tokens with the {held} in the cache, "
        f"expected {at_least} or more; resume(tokens, at_least=0) drops them",
        rule="L8",
    )


def no_ids() -> CacheError:
    """Return the error for caches of which no token ids are recorded."""
    return CacheError(
        "the file holds no token ids, so no prompt can go on from it; "
        "`vkv convert --model … --prompt …` adds them",
        rule="L8",
    )


def uncounted(missing: int) -> CacheError:
    """Return the error for caches that count nothing, while ids were still to be computed."""
    return CacheError(
        f"this cache does not count its tokens, and {missing} ids "
        "were to be computed; once they are, give those generated since to extend()",
        rule="L8",
    )


def miscounted(held: Iterable[int], recorded: int) -> CacheError:
    """Return the error for caches that hold another number of tokens than is recorded."""
    numbers = " or ".join(map(str, sorted(held)))
    return CacheError(
        f"the cache holds {numbers} tokens, {recorded} would be recorded: expected "
        "exactly the ids that were computed",
        rule="L8",
    )


def unextended(held: int | None, recorded: int) -> CacheError:
    """Return the error for generated ids that were not recorded before the next turn."""
    return CacheError(
        f"the cache holds {held} tokens, {recorded} are recorded; give the ids "
        "that the model generated to extend()",
        rule="L8",
    )


def no_point(tokens: int, points: Sequence[int], held: int) -> CacheError:
    """Return the error for a number of tokens before every point to go back to."""
    listed = ", ".join(map(str, points)) or "none"
    return CacheError(
        f"no point at or before {tokens} tokens to go back to; checkpoints: {listed}; the end: "
        f"{held}",
        rule="L8",
    )


def interrupted() -> CacheError:
    """Return the error for caches of a step that may have ended between the layers."""
    return CacheError(
        "a step was interrupted, or not all tokens were computed: some layers may hold tokens "
        "that others do not, and recurrent state cannot go back; load the prompt again, or "
        "compute it with vkv.prefill(model, tokens, checkpoints=…), to whose checkpoints "
        "resume goes back",
        rule="L8",
    )
