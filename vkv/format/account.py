"""Account for every byte of a file, by role and by tensor. Needs neither codecs nor MLX."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from vkv.format.document import Document
from vkv.format.framing import HEADER
from vkv.format.layers import segment_shape, segments
from vkv.format.schema import ROLES, Header

#: Rows of the account: the roles of stored tensors, and framing plus header.
ROWS = (*ROLES, "header")
#: Group of all that checkpoints hold; it represents no elements of the cache.
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Group:
    """Count bytes and elements of all tensors of one name, e.g. ``"keys"``.

    Attributes:
        elements: Cached elements that it represents.
        bytes: Bytes stored for this group alone.
        roles: The same by role.
    """

    elements: int
    bytes: int
    roles: dict[str, int]

    @property
    def bits(self) -> float:
        """Bits per element, without the header and what several groups share."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Accounting:
    """Hold the byte account of a file. ``roles`` adds up to ``size`` exactly.

    Attributes:
        size: Bytes of the file.
        roles: Role -> bytes, over ``ROWS``; ``header`` is framing plus header.
        groups: Tensor name (``keys``, ``values`` …) -> its own account.
        shared: Bytes that several groups use (a codebook), or that are tables for other files.
        elements: Cached elements in the file.
        external: Bytes used from files that this one depends on; in no other number here.
    """

    size: int
    roles: dict[str, int]
    groups: dict[str, Group]
    shared: int
    elements: int = field(default=0)
    external: int = 0

    @property
    def bits(self) -> float:
        """Bits per element: every byte of the file over all cached elements."""
        return 8 * self.size / self.elements if self.elements else 0.0

    @property
    def ratio(self) -> float:
        """Size of the same elements in fp16 over the size of the file."""
        return 2 * self.elements / self.size

    @property
    def adds_up(self) -> bool:
        return sum(self.roles.values()) == self.size


def checkpoint_bytes(header: Header) -> list[int]:
    """Return the stored bytes of each checkpoint; a tensor of several counts for the first."""
    totals, seen = [0] * len(header.checkpoints), set[str]()
    for path, _, _, segment in segments(header):
        if path.startswith(CHECKPOINTS):
            index = int(path[len(CHECKPOINTS) + 1 : path.index("]")])
            new = set(segment.parts.values()) - seen
            totals[index] += sum(header.tensors[name].nbytes for name in new)
            seen |= new
    return totals


def account(document: Document) -> Accounting:
    """Account for every byte of ``document``."""
    stored = document.header.tensors
    roles = dict.fromkeys(ROWS, 0)
    for info in stored.values():
        if info.file is None:
            roles[info.role] += info.nbytes
    entry = document.entries[HEADER]
    roles["header"] = entry.stop
    users: dict[str, set[str]] = {}
    elements: Counter[str] = Counter()
    for path, name, tensor, segment in segments(document.header):
        if path.startswith(CHECKPOINTS):
            name = CHECKPOINTS
        else:
            elements[name] += prod(segment_shape(tensor, segment))
        for part in segment.parts.values():
            users.setdefault(part, set()).add(name)
    own: dict[str, Counter[str]] = {
        name: Counter() for name in sorted({*elements, *set().union(*users.values())})
    }
    unused_tables = set(document.header.tables.values()) - users.keys()
    shared, external = sum(stored[name].nbytes for name in unused_tables), 0
    for part, (first, *others) in users.items():
        info = stored[part]
        if info.file is not None:
            external += info.nbytes
        elif others:
            shared += info.nbytes
        elif info.nbytes:
            own[first][info.role] += info.nbytes
    groups = {
        name: Group(elements[name], counts.total(), _sorted(counts)) for name, counts in own.items()
    }
    return Accounting(document.size, roles, groups, shared, elements.total(), external)


def _sorted(roles: Counter[str]) -> dict[str, int]:
    """Return ``roles`` in the order of ``ROLES``."""
    return {role: roles[role] for role in ROLES if role in roles}
