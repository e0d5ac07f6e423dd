"""Limit what checkpoints cost, as a share of the cache that they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vkv.caches.checkpoints.record import (
    Checkpoint,
    CheckpointedCache,
    checkpoints_of,
    lets_go,
    take,
)
from vkv.caches.kinds import live
from vkv.errors import VkvError
from vkv.format.limits import FEW as MAX_CHECKPOINTS

#: Default where vkv chooses the points. A new question or an edited message saves most of a
#: prompt's computation, so a third of its bytes is a fair price; more is the caller's choice.
SHARE = 0.3
#: Checkpoints that are kept whatever they cost: the end of the first message (the system
#: prompt, which most prompts share) and the newest (an edited message, an answer computed
#: again). Without both there is nothing to go back to, and the cap would switch them off.
ALWAYS = 2


def check_share(share: Any) -> None:
    """Refuse what is no share: a number from 0 on; 0.5 is half of the cache."""
    if type(share) not in (int, float) or not (math.isfinite(share) and share >= 0):
        raise VkvError(f"a share of {share!r} for checkpoints, expected a number from 0 on")


def within(
    checkpoints: Sequence[Checkpoint], share: float | None, cache_bytes: float
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that cost at most a share of a cache, ascending.

    The oldest go first, ends of messages last. Bytes are those in memory, before any codec.

    Args:
        checkpoints: In ascending order.
        share: Bytes of all checkpoints over ``cache_bytes``; ``None`` keeps all that a file
            can hold. 0 keeps none; with more, ``ALWAYS`` are kept whatever they cost.
        cache_bytes: Bytes of the cache.
    """
    check_share(0 if share is None else share)
    left = math.inf if share is None else share * cache_bytes
    kept = list[Checkpoint]()
    for checkpoint in _by_worth(checkpoints)[:MAX_CHECKPOINTS]:
        left -= checkpoint.nbytes
        if share == 0 or (left < 0 and len(kept) >= ALWAYS):
            break
        kept.append(checkpoint)
    return tuple(sorted(kept, key=lambda c: c.tokens))


def _by_worth(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the end of the first message, then of the newest ones, then others, newest first."""
    ends = [c for c in checkpoints if c.message]
    others = [c for c in checkpoints if not c.message]
    return [*ends[:1], *reversed(ends[1:]), *reversed(others)]


def cache_bytes(caches: Sequence[Any]) -> int:
    """Return the bytes that caches hold, without the padding of growing buffers."""
    return sum(map(live.nbytes, caches))


def with_checkpoint(
    caches: Sequence[Any], ids: Sequence[int], *, message: bool = False
) -> CheckpointedCache:
    """Return the caches with one more checkpoint: as they are now, if any lets go of tokens.

    Args:
        caches: One per layer, and the checkpoints they carry.
        ids: What they hold.
        message: They end with a message.
    """
    known = [c for c in checkpoints_of(caches) if c.fits(ids) and c.tokens < len(ids)]
    new = [take(caches, len(ids), message=message, ids=ids)] if ids and lets_go(caches) else []
    return CheckpointedCache(caches, within([*known, *new], None, 0))
