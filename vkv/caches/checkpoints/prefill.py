"""Compute a prompt into caches, and take checkpoints on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx

from vkv import identity
from vkv.caches.checkpoints.record import (
    Checkpoint,
    CheckpointedCache,
    checkpoints_of,
    leaves,
    take,
)
from vkv.caches.prompt import Prompt
from vkv.errors import CacheError, VkvError
from vkv.format.limits import FEW as MAX_CHECKPOINTS

#: Where checkpoints are taken: token counts, every so many tokens, or at the ends of messages.
Checkpoints = Sequence[int] | int | Literal["messages"] | None
#: Called with (tokens done, tokens in all).
Progress = Callable[[int, int], None]
#: Classes of ``mlx.nn`` that turn ids into vectors; an id past the table reads foreign memory.
EMBEDDINGS = ("Embedding", "QuantizedEmbedding")
#: Tokens of one forward pass.
STEP = 512


def prefill(
    model: Any,
    tokens: Any,
    *,
    checkpoints: Checkpoints = None,
    messages: Sequence[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    cache: list[Any] | None = None,
    step: int = STEP,
    progress: Progress | None = None,
) -> Prompt:
    """Compute a prompt, and keep checkpoints that a later prompt can go back to.

    Args:
        model: An mlx-lm model.
        tokens: Ids of the whole prompt, as ``vkv.save`` takes them.
        checkpoints: Numbers of tokens; or one number, for a checkpoint after every so many;
            or ``"messages"``, for one at the end of each of ``messages``. With any of them
            there is one more, a token before the end: an answer can be computed again.
            Caches that can be cut need none, and take none.
        messages: The conversation that ``tokens`` encode, for ``"messages"``.
        tokenizer: The tokenizer whose template encoded them, likewise.
        cache: Empty caches to fill; by default those that mlx-lm makes for ``model``.
        step: Tokens of one forward pass.
        progress: Called with (tokens done, tokens in all).

    Returns:
        The prompt. Its ``cache`` carries the checkpoints into ``vkv.save``, a store, and
        deep copies.

    Raises:
        CacheError: ``cache`` holds tokens already, or there is nothing to compute (L8).
        VkvError: ``tokens`` are no token ids (I2), or ``checkpoints`` does not fit them.
    """
    ids = list(memoryview(identity.token_bytes(tokens)).cast("I"))
    _check(model, ids, step)
    caches = _fresh(model, cache)
    ends = _message_ends(ids, messages, tokenizer) if _at_messages(checkpoints) else []
    stops = boundaries(checkpoints, len(ids), ends)
    taken: list[Checkpoint] = []
    done = 0
    for stop in [*stops, len(ids)]:
        while done < stop:
            piece = ids[done : min(stop, done + step)]
            mx.eval(model(mx.array([piece]), cache=caches))
            mx.eval([c.state for c in caches if not c.empty()])
            done += len(piece)
            if progress is not None:
                progress(done, len(ids))
        if done < len(ids):
            taken.append(take(caches, done, message=done in ends, ids=ids))
    kept = [c for c in taken if c.layers]
    return Prompt(CheckpointedCache(caches, kept), ids)


def _fresh(model: Any, cache: list[Any] | None) -> list[Any]:
    """Return caches to fill: new ones, or those given, if they are empty and as many."""
    from mlx_lm.models.cache import make_prompt_cache

    made = list(make_prompt_cache(model))
    if cache is None:
        return made
    if len(cache) != len(made):
        raise CacheError(f"{len(cache)} caches, the model takes {len(made)}", rule="L7")
    if checkpoints_of(cache) or not all(leaf.empty() for _, leaf in leaves(cache)):
        raise CacheError("the cache holds tokens already, expected an empty one", rule="L8")
    return cache


def _check(model: Any, ids: list[int], step: int) -> None:
    """Refuse what would end in MLX, or read past the embeddings."""
    if not ids:
        raise CacheError("an empty prompt: there is nothing to compute", rule="L8")
    if type(step) is not int or step < 1:
        raise VkvError(f"step is {step!r}, expected a whole number above 0")
    if not hasattr(model, "modules"):
        found = type(model).__name__
        raise VkvError(f"model is a {found}, expected a model as mlx_lm.load gives it")
    tables = [m for m in model.modules() if type(m).__name__ in EMBEDDINGS]
    rows = max((m.weight.shape[0] for m in tables), default=0)
    if rows and max(ids) >= rows:
        raise VkvError(
            f"token id {max(ids)}, the model has {rows} embeddings", rule="I2", at="tokens"
        )


def boundaries(checkpoints: Checkpoints, count: int, ends: Sequence[int] = ()) -> list[int]:
    """Return where a prefill of ``count`` tokens stops, ascending.

    Raises:
        VkvError: Not numbers from 1 to ``count``, nor another form of ``checkpoints``.
    """
    if checkpoints is None:
        return []
    if _at_messages(checkpoints):
        asked = list(ends)[-(MAX_CHECKPOINTS - 1) :]
    elif type(checkpoints) is int and checkpoints > 0:
        asked = list(range(checkpoints, count, checkpoints))
    elif isinstance(checkpoints, Sequence) and not isinstance(checkpoints, str):
        asked = list(checkpoints)
    else:
        raise VkvError(
            f"checkpoints={checkpoints!r}, expected token counts, a number, or 'messages'"
        )
    if bad := [n for n in asked if type(n) is not int or not 1 <= n <= count]:
        raise VkvError(f"a checkpoint at {bad[0]!r}, expected a number from 1 to {count}")
    stops = sorted({*(n for n in asked if n < count), *([count - 1] if count > 1 else [])})
    if len(stops) > MAX_CHECKPOINTS:
        raise VkvError(f"{len(stops)} checkpoints, a file holds {MAX_CHECKPOINTS}; ask for fewer")
    return stops


def _at_messages(checkpoints: Checkpoints) -> bool:
    return isinstance(checkpoints, str) and checkpoints == "messages"


def _message_ends(
    ids: list[int], messages: Sequence[dict[str, Any]] | None, tokenizer: Any
) -> list[int]:
    """Return how many leading ids each beginning of the conversation has in common with all."""
    if not messages or tokenizer is None:
        raise VkvError("checkpoints='messages' needs messages= and tokenizer=")
    ends = set()
    for n in range(1, len(messages) + 1):
        part = tokenizer.apply_chat_template(list(messages[:n]), add_generation_prompt=False)
        ends.add(identity.common_prefix(part, ids))
    return sorted(ends - {0})
