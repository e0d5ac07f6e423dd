"""Name the entries of a remote, so that names alone find the longest prefix.

A prompt is cut at fixed lengths, the *bounds*; the prefix up to each has a hash that
continues the one before it. An entry that can be trimmed stands under the hash of each
of its bounds, so which bounds of a prompt are stored is a yes up to some length and a
no from there: a bisection finds it. One that cannot be trimmed serves whole, or at one of
its checkpoints, and stands under the length and the hash of the tokens of each
(``spec/decisions/0006-remote-layout.md``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from blake3 import blake3

from vkv.store.local.prefix_tree import WIDTH
from vkv.store.local.summary import Description

#: Tokens up to the first bound; shorter entries are not found, only named.
FIRST = 32
_SEED = b"vkv keys 1"
#: Bytes of a hash in a name. Equal names of other tokens would cost a look at the file.
_HASH = 16
_ENTRY = re.compile("(?P<count>[0-9]{1,9})-(?P<id>[0-9a-f]{64})")
_WHOLE = re.compile("(?P<count>[0-9]{1,9})-(?P<hash>[0-9a-f]{32})-(?P<id>[0-9a-f]{64})")


def bounds(count: int) -> list[int]:
    """Return the bounds up to ``count`` tokens: every 32, and from 512 eight for each doubling.

    So the number of names grows with the logarithm: 76 for 100,000 tokens.
    """
    found, at = [], FIRST
    while at <= count:
        found.append(at)
        at += max(FIRST, (1 << (at.bit_length() - 1)) >> 3)
    return found


def chain(model: bytes, tokens: bytes) -> list[str]:
    """Return the hash at each bound of ``tokens`` (little-endian u32), for a model."""
    state = blake3(_SEED + model).digest()
    found, start = [], 0
    for bound in bounds(len(tokens) // WIDTH):
        state = blake3(state + tokens[start * WIDTH : bound * WIDTH]).digest()
        found.append(state[:_HASH].hex())
        start = bound
    return found


def whole(model: bytes, tokens: bytes) -> str:
    """Return the hash of all ``tokens``, for a model."""
    return blake3(_SEED + model + tokens).digest()[:_HASH].hex()


def names(what: Description) -> list[str]:
    """Return the names of the key objects of an entry."""
    folder = what.model.hex()[:16]
    if not what.trims:
        return [
            f"exact/{folder}/{n}-{whole(what.model, what.tokens[: n * WIDTH])}-{what.key}"
            for n in (*what.checkpoints, what.count)
        ]
    return [f"keys/{folder}/{x}/{what.count}-{what.key}" for x in chain(what.model, what.tokens)]


def last_yes(asks: Callable[[int], bool], low: int, high: int, pool: Executor, parts: int) -> int:
    """Return the largest ``n`` up to ``high`` for which ``asks(n)``, which is yes up to it.

    Asks ``parts`` questions at a time: each round leaves one part of so many. The first
    is the next number, so that one round is enough where the answer is ``low``.

    Args:
        asks: Called with numbers above ``low``, from several threads.
        low: Known to be a yes.
        high: The largest possible.
        pool: Where the questions run.
        parts: Questions at a time, at least 2.
    """
    while low < high:
        step = (high - low) / parts
        probes = sorted({min(high, low + 1 + int(step * i)) for i in range(parts)})
        answers = list(pool.map(asks, probes))
        yes = [probe for probe, answer in zip(probes, answers, strict=True) if answer]
        no = [probe for probe in probes if probe > (yes[-1] if yes else low)]
        low, high = (yes[-1] if yes else low), (no[0] - 1 if no else high)
    return low


def whole_prefixes(
    listed: list[str], model: bytes, tokens: bytes, longer_than: int
) -> Iterator[tuple[int, str]]:
    """Yield those of names ``count-hash-id`` that stand for a prefix of ``tokens``, longest first.

    Each as (tokens, id of the entry).
    """
    found = [match for name in listed if (match := _WHOLE.fullmatch(name))]
    top = len(tokens) // WIDTH
    count, own = 0, ""
    for match in sorted(found, key=lambda m: int(m["count"]), reverse=True):
        if not longer_than < int(match["count"]) <= top:
            continue
        if count != int(match["count"]):
            count = int(match["count"])
            own = whole(model, tokens[: count * WIDTH])
        if own == match["hash"]:
            yield count, match["id"]


def entry(name: str) -> tuple[int, str] | None:
    """Return tokens and id of a name ``count-id``, or ``None`` for another name."""
    match = _ENTRY.fullmatch(name)
    return match and (int(match["count"]), match["id"])
