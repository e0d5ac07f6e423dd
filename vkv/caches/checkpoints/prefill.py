"""Compute a prompt into caches, and take checkpoints on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import mlx.core as mx

from vkv import identity
from vkv.caches.checkpoints.cap import SHARE, cache_bytes, check_share, within
from vkv.caches.checkpoints.message_ends import message_ends
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
from vkv.identity.model import require_model

#: Where checkpoints are taken: token counts, every so many tokens, or at the ends of messages.
Checkpoints = Sequence[int] | int | Literal["messages"] | None
#: Called with (tokens done, tokens in all).
Progress = Callable[[int, int], None]
#: Classes of ``mlx.nn`` that turn ids into vectors; an id past the table reads foreign memory.
EMBEDDINGS = ("Embedding", "QuantizedEmbedding")
#: Tokens of one forward pass.
STEP = 512
#: Messages before the last whose ends get a checkpoint, besides that of the system prompt.
NEWEST = 16
#: Tokens that are as well computed again as stored, like those that begin an answer: so near to the
#: end of a prompt a message's end serves as well as one more checkpoint.
NEAR = 32


def prefill(
    model: Any,
    tokens: Any,
    *,
    checkpoints: Checkpoints = None,
    messages: Sequence[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    checkpoint_share: float | None = None,
    cache: list[Any] | None = None,
    step: int = STEP,
    progress: Progress | None = None,
) -> Prompt:
    """Compute a prompt, and keep checkpoints that a later prompt can go back to.

    Args:
        model: An mlx-lm model.
        tokens: Ids of the whole prompt, as ``vkv.save`` takes them.
        checkpoints: Numbers of tokens; or one number, for a checkpoint after every so many;
            or ``"messages"``, for one at the end of the system prompt and of each of the last
            messages. There is one more, a token before the end, where no message ends near
            it: an answer can be computed again. Caches that can be cut take none.
        messages: The conversation that ``tokens`` encode, for ``"messages"``.
        tokenizer: The tokenizer whose template encoded them, likewise.
        checkpoint_share: What checkpoints may cost: their bytes in memory over those of the
            cache. The oldest are dropped first, ends of messages last, the end of the
            first message and the newest never, unless it is 0. By default 0.3 where vkv
            chooses the points, and no limit for those that are given as numbers of tokens.
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
    ends = _ends(ids, messages, tokenizer) if _at_messages(checkpoints) else []
    stops = boundaries(checkpoints, len(ids), ends)
    share = _share(checkpoints, checkpoint_share)
    caches = _fresh(model, cache)
    taken: tuple[Checkpoint, ...] = ()
    done = 0
    for stop in [*stops, len(ids)]:
        while done < stop:
            piece = ids[done : min(stop, done + step)]
            mx.eval(model(mx.array([piece]), cache=caches))
            mx.eval([c.state for c in caches if not c.empty()])
            done += len(piece)
            if progress is not None:
                progress(done, len(ids))
        if done < len(ids) and (new := take(caches, done, message=done in ends, ids=ids)).layers:
            # The whole cache is at least as large as now, and at most as the tokens say.
            at_most = cache_bytes(caches) * len(ids) / done
            taken = within([*taken, new], share, at_most)
    return Prompt(CheckpointedCache(caches, within(taken, share, cache_bytes(caches))), ids)


def _share(checkpoints: Checkpoints, share: float | None) -> float | None:
    """Return the share that checkpoints may have; ``None`` for no limit."""
    if share is not None:
        check_share(share)
        return share
    return SHARE if _at_messages(checkpoints) or isinstance(checkpoints, int) else None


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
    require_model(model, "modules")
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
    at_end = count - 1
    if _at_messages(checkpoints):
        asked = list(ends)[-(MAX_CHECKPOINTS - 1) :]
        near = [end for end in asked if count - NEAR <= end < count]
        at_end = near[-1] if near else at_end
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
    stops = sorted({*(n for n in asked if n < count), *([at_end] if count > 1 else [])})
    if len(stops) > MAX_CHECKPOINTS:
        raise VkvError(f"{len(stops)} checkpoints, a file holds {MAX_CHECKPOINTS}; ask for fewer")
    return stops


def _at_messages(checkpoints: Checkpoints) -> bool:
    return isinstance(checkpoints, str) and checkpoints == "messages"


def _ends(ids: list[int], messages: Sequence[dict[str, Any]] | None, tokenizer: Any) -> list[int]:
    """Return the ends of messages among the ids of a conversation."""
    if not messages or tokenizer is None:
        raise VkvError("checkpoints='messages' needs messages= and tokenizer=")
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=False)
    return message_ends(ids, messages, render, NEWEST)
