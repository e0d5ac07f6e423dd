"""What the store tells of an entry, and what it finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored prompt.

    Attributes:
        id: Hex BLAKE3 of the file's header; the name of the file.
        path: The ``.vkv`` file.
        size: Bytes of that file.
        tokens: How many tokens it covers.
        model: Hex id of the model it belongs to.
        label: A name of that model for people: metadata ``model``, else its type.
        codec: Codec of keys and values, or of each.
        created: When it was put in, in seconds since 1970.
        used: When it was last put in or answered.
        uses: How often it was answered.
        pinned: Whether it is exempt from eviction.
    """

    id: str
    path: Path
    size: int
    tokens: int
    model: str
    label: str
    codec: str
    created: float
    used: float
    uses: int
    pinned: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True, slots=True)
class Found:
    """The longest stored prefix of a prompt, not yet loaded.

    Attributes:
        entry: Which entry has it.
        tokens: How many leading tokens of the prompt it covers.
    """

    entry: Entry
    tokens: int


@dataclass(slots=True)
class Hit:
    """The longest stored prefix of a prompt, ready to go on.

    Attributes:
        entry: Where it came from.
        cache: One mlx-lm cache per layer, trimmed to ``tokens``.
        tokens: How many leading tokens of the prompt the cache holds.
        rest: The tokens still to be computed; at least one.
    """

    entry: Entry
    cache: list[Any] = field(repr=False)
    tokens: int
    rest: list[int] = field(repr=False)
