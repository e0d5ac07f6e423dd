"""Define what the store returns: entries, matches, statistics, what was removed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """Describe one stored prompt.

    Attributes:
        id: Hex BLAKE3 of the file's header; the name of the file.
        path: The ``.vkv`` file.
        size: Bytes of that file.
        tokens: How many tokens it covers.
        model: Hex id of the model it belongs to.
        label: A name of that model for people: the last part of metadata ``model``, else
            its type and the first digits of its id.
        codec: Codec of keys and values, or of each.
        name: A name that it was given, in metadata ``name``; empty if it has none.
        tags: Words that it was given, in metadata ``tags``, separated by commas.
        dependencies: Ids of the files in the store that this one depends on.
        created: When it was put, in seconds since 1970.
        used: When it was last put or returned by ``get``.
        uses: How often it was.
        pinned: Whether it is exempt from eviction.
    """

    id: str
    path: Path
    size: int
    tokens: int
    model: str
    label: str
    codec: str
    name: str
    tags: tuple[str, ...]
    dependencies: tuple[str, ...]
    created: float
    used: float
    uses: int
    pinned: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True, slots=True)
class Found:
    """Name the longest stored prefix of a prompt, which is not yet loaded.

    Attributes:
        entry: Which entry has it.
        tokens: How many leading tokens of the prompt it covers.
    """

    entry: Entry
    tokens: int


@dataclass(slots=True)
class Hit:
    """Hold the longest stored prefix of a prompt, as live caches.

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


@dataclass(frozen=True, slots=True)
class Stats:
    """Count what a store holds.

    Attributes:
        root: Its directory.
        entries: Number of entries.
        models: Number of models that they belong to.
        tokens: Tokens that they cover, in all.
        bytes: Size of all files together, as ``du`` counts them.
        pinned: Bytes of pinned entries.
        retained: Bytes of removed entries that others depend on.
        quarantined: Bytes of entries that cannot be loaded and were put aside.
        max_bytes: The limit, if there is one.
    """

    root: Path
    entries: int
    models: int
    tokens: int
    bytes: int
    pinned: int
    retained: int
    quarantined: int
    max_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"schema_version": 1, **asdict(self), "root": str(self.root)}


@dataclass(slots=True)
class Collected:
    """Entries and files that ``PromptStore.gc`` or ``rm`` removed, or would remove.

    Attributes:
        dry_run: Nothing was touched.
        entries: Entries taken out: asked for, over a limit, of a codec or version that this
            build lacks, or without their file.
        files: Files removed: left by dead writers, or no entries.
        freed: Bytes of both; not of files that others depend on, which stay.
        unread: Files that could not be read just now; they stay.
        over: Bytes that are still over a limit: pinned, or needed by what is pinned.
    """

    dry_run: bool
    entries: list[Entry] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)
    freed: int = 0
    over: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema_version": 1,
            "dry_run": self.dry_run,
            "freed": self.freed,
            "over": self.over,
            "entries": [entry.to_dict() for entry in self.entries],
            "files": [str(path) for path in self.files],
            "unread": [str(path) for path in self.unread],
        }
