"""Find the longest prefix of a prompt that a remote has, by names alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vkv.errors import VkvError
from vkv.store.local.prefix_tree import WIDTH, common_bytes
from vkv.store.local.summary import describe, known_needs
from vkv.store.remote import keys
from vkv.store.remote.daemon_pool import DaemonPool
from vkv.store.remote.objects import RemoteObjects

#: Questions asked at once.
QUESTIONS = 8
#: Entries opened before a search gives up: damaged, gone, or of a newer vkv.
MAX_OPENED = 8


@dataclass(frozen=True, slots=True)
class Match:
    """Describe the longest prefix of a prompt that a remote has.

    Attributes:
        id: Of the file.
        tokens: How many leading tokens of the prompt it covers.
        size: Bytes of the file.
    """

    id: str
    tokens: int
    size: int


def longest(
    objects: RemoteObjects,
    data: bytes,
    owner: bytes,
    longer_than: int = 0,
    refused: frozenset[str] = frozenset(),
) -> Match | None:
    """Return the entry of model ``owner`` that covers most leading tokens of ``data``.

    Args:
        objects: Of the remote.
        data: Token bytes, all of which may be covered.
        owner: Id of the model.
        longer_than: Only longer prefixes matter; few names are asked for if there is none.
        refused: Ids that are left out.
    """
    bound = _by_bounds(objects, data, owner, longer_than)
    best = _first(objects, (k for k in bound if k not in refused), data, owner, longer_than)
    longer_than = best.tokens if best else longer_than
    listed = objects.names(f"exact/{owner.hex()[:16]}")
    whole = keys.whole_prefixes(listed, owner, data, longer_than)
    others = (key for _, key in whole if key not in refused)
    return _first(objects, others, data, owner, longer_than) or best


def _by_bounds(
    objects: RemoteObjects, data: bytes, owner: bytes, longer_than: int
) -> Iterator[str]:
    """Yield ids of entries that share bounds of ``data`` past ``longer_than``, deepest first."""
    folders = [f"keys/{owner.hex()[:16]}/{hashed}" for hashed in keys.chain(owner, data)]
    ends = keys.bounds(2 * len(data) // WIDTH + keys.FIRST)  # one more than folders, or several
    low = bisect_right(ends, longer_than)
    with DaemonPool(QUESTIONS, "vkv-find") as pool:
        deepest = keys.last_yes(
            lambda n: objects.has(folders[n - 1]), low, len(folders), pool, QUESTIONS
        )
    for depth in range(deepest, low, -1):
        found = [e for name in objects.names(folders[depth - 1]) if (e := keys.entry(name))]
        # All share this bound and not the next: the longest that may end before it, else
        # the smallest file.
        near = [e for e in found if e[0] < ends[depth]]
        far = [e for e in found if e[0] >= ends[depth]]
        yield from (key for _, key in sorted(near, reverse=True) + sorted(far))


def _first(
    objects: RemoteObjects, found: Iterable[str], data: bytes, owner: bytes, longer_than: int
) -> Match | None:
    """Return the first of ``found`` that really covers more than ``longer_than`` tokens."""
    seen = set[str]()
    for key in found:
        if key not in seen:
            seen.add(key)
            match = _match(objects, key, data, owner)
            if match is not None and match.tokens > longer_than:
                return match
        if len(seen) == MAX_OPENED:
            break
    return None


def _match(objects: RemoteObjects, key: str, data: bytes, owner: bytes) -> Match | None:
    """Return how much of ``data`` an entry covers, by the file itself."""
    try:
        with objects.open(key) as document:
            what = describe(document)
    except (VkvError, FileNotFoundError):
        return None
    known = known_needs().issuperset(what.needs.split())
    if what.key != key or what.model != owner or not known:
        return None
    common = common_bytes(data, what.tokens) // WIDTH
    return Match(key, what.covers(common), what.size)
