"""The longest prefix of a prompt that a remote has, found by names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from vkv.errors import VkvError
from vkv.format.document import Document
from vkv.store.local import summary as describe
from vkv.store.local.prefix_tree import WIDTH, common_bytes
from vkv.store.remote import keys

#: Questions asked at once.
WAYS = 8
#: Entries looked at before a search gives up: others are damaged, gone, or of a newer vkv.
LOOKS = 8


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt that a remote has.

    Attributes:
        id: Of the file.
        tokens: How many leading tokens of the prompt it covers.
        size: Bytes of the file.
    """

    id: str
    tokens: int
    size: int


class Place(Protocol):
    """What a search asks of a remote."""

    def has(self, name: str) -> bool: ...

    def names(self, folder: str) -> list[str]: ...

    def open(self, key: str) -> Document: ...


def longest(place: Place, data: bytes, owner: bytes, longer_than: int = 0) -> Match | None:
    """The entry of model ``owner`` that covers most leading tokens of ``data``.

    Args:
        place: The remote.
        data: Token bytes, all of which may be covered.
        owner: Id of the model.
        longer_than: Only longer prefixes matter; few names are asked for if there is none.
    """
    best = _first(place, _by_bounds(place, data, owner, longer_than), data, owner, longer_than)
    longer_than = best.tokens if best else longer_than
    listed = place.names(f"exact/{owner.hex()[:16]}")
    whole = keys.whole_prefixes(listed, owner, data, longer_than)
    return _first(place, (key for _, key in whole), data, owner, longer_than) or best


def _by_bounds(place: Place, data: bytes, owner: bytes, longer_than: int) -> Iterator[str]:
    """Ids of entries that share bounds of ``data`` past ``longer_than``, deepest first."""
    folders = [f"keys/{owner.hex()[:16]}/{hashed}" for hashed in keys.chain(owner, data)]
    ends = keys.bounds(2 * len(data) // WIDTH + keys.FIRST)  # one more than folders, or several
    low = bisect_right(ends, longer_than)
    with ThreadPoolExecutor(WAYS, "vkv-find") as pool:
        deepest = keys.last_yes(lambda n: place.has(folders[n - 1]), low, len(folders), pool, WAYS)
    for depth in range(deepest, low, -1):
        found = [e for name in place.names(folders[depth - 1]) if (e := keys.entry(name))]
        # All share this bound and not the next: the longest that may end before it, else
        # the smallest file.
        near = [e for e in found if e[0] < ends[depth]]
        far = [e for e in found if e[0] >= ends[depth]]
        yield from (key for _, key in sorted(near, reverse=True) + sorted(far))


def _first(
    place: Place, found: Iterable[str], data: bytes, owner: bytes, longer_than: int
) -> Match | None:
    """The first of ``found`` that really covers more than ``longer_than`` tokens."""
    seen = set[str]()
    for key in found:
        if key not in seen:
            seen.add(key)
            match = _match(place, key, data, owner)
            if match is not None and match.tokens > longer_than:
                return match
        if len(seen) == LOOKS:
            break
    return None


def _match(place: Place, key: str, data: bytes, owner: bytes) -> Match | None:
    """How much of ``data`` an entry covers, as the file itself says."""
    try:
        with place.open(key) as document:
            what = describe.of(document)
    except (VkvError, FileNotFoundError):
        return None
    known = describe.known_needs().issuperset(what.needs.split())
    if what.key != key or what.model != owner or not known:
        return None
    common = common_bytes(data, what.tokens) // WIDTH
    return Match(key, common if what.trims or common == what.count else 0, what.size)
