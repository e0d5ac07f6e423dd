"""What every byte of a file is spent on; needs neither codecs nor MLX."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from vkv.format.container import HEADER
from vkv.format.document import Document
from vkv.format.layers import segment_shape, segments
from vkv.format.schema import ROLES

#: Rows that are no role of a stored tensor: framing and header.
ROWS = (*ROLES, "header")


@dataclass(frozen=True, slots=True)
class Group:
    """Bytes and elements of all tensors of one name, e.g. ``"keys"``.

    Attributes:
        elements: Cached elements represented.
        bytes: Bytes stored for them alone.
        roles: The same by role.
    """

    elements: int
    bytes: int
    roles: dict[str, int]

    @property
    def bits(self) -> float:
        """Bits per element, what is shared with other groups and the header not counted."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Accounting:
    """The byte account. ``roles`` adds up to ``size`` exactly.

    Attributes:
        size: Bytes of the file.
        roles: Role -> bytes, over ``ROWS``; ``header`` is framing plus header.
        groups: Tensor name (``keys``, ``values`` …) -> its own account.
        shared: Bytes that several groups use (a codebook), or that are for other files.
        elements: Cached elements in the file.
        elsewhere: Bytes of other files that this one stands on; in no other number here.
    """

    size: int
    roles: dict[str, int]
    groups: dict[str, Group]
    shared: int
    elements: int = field(default=0)
    elsewhere: int = 0

    @property
    def bits(self) -> float:
        """Bits per element, all in: every byte of the file over all cached elements."""
        return 8 * self.size / self.elements if self.elements else 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller than the same elements in fp16."""
        return 2 * self.elements / self.size

    @property
    def adds_up(self) -> bool:
        return sum(self.roles.values()) == self.size


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
    for _, name, tensor, segment in segments(document.header):
        elements[name] += prod(segment_shape(tensor, segment))
        for part in segment.parts.values():
            users.setdefault(part, set()).add(name)
    own: dict[str, Counter[str]] = {name: Counter() for name in elements}
    offered = set(document.header.tables.values()) - users.keys()
    shared, elsewhere = sum(stored[name].nbytes for name in offered), 0
    for part, (first, *others) in users.items():
        info = stored[part]
        if info.file is not None:
            elsewhere += info.nbytes
        elif others:
            shared += info.nbytes
        elif info.nbytes:
            own[first][info.role] += info.nbytes
    groups = {
        name: Group(count, own[name].total(), _sorted(own[name]))
        for name, count in elements.items()
    }
    return Accounting(document.size, roles, groups, shared, elements.total(), elsewhere)


def _sorted(roles: Counter[str]) -> dict[str, int]:
    """In the order of ``ROLES``."""
    return {role: roles[role] for role in ROLES if role in roles}
