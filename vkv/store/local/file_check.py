"""Read the files of entries: what they describe, whether every byte is sound, their tokens.

None of this needs a lock of the index. What was judged is remembered as a ``Stamp``, which
is compared again under the lock before anything is done about it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Row

from vkv.errors import CacheError, CodecError, HeaderError, UnsupportedError, VkvError
from vkv.format.document import open_document
from vkv.format.file_id import is_file_id
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import DamagedEntryError
from vkv.store.local.summary import Description, describe, is_entry, read_tokens

#: Tells one file from another that later has the same name.
Stamp = tuple[int, ...]


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return device, inode, size and times of a file; ``None`` if there is none."""
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


#: Raised for what was written, not for bytes that changed since: the header has a digest (C10).
_RULES = HeaderError | CodecError | CacheError | UnsupportedError


@dataclass(frozen=True, slots=True)
class Examined:
    """One file of the store after it was read.

    Attributes:
        path: The file.
        stamp: Of the file that was read.
        size: Its bytes.
        modified: When it was last written, in seconds since 1970.
        description: Its summary; ``None`` if it is damaged, or holds no prompt.
        problem: What is wrong with it, if anything is.
    """

    path: Path
    stamp: Stamp | None
    size: int = 0
    modified: float = 0.0
    description: Description | None = None
    problem: Exception | None = None

    @property
    def breaks_rule(self) -> bool:
        """Return whether its bytes are as they were written, and this build refuses them."""
        return isinstance(self.problem, _RULES)

    @property
    def unchanged(self) -> bool:
        """Return whether the file of this name is still the one that was read."""
        return self.stamp is not None and self.stamp == stamp(self.path)


def examine(layout: Layout, path: Path, *, digests: bool = False) -> Examined:
    """Read a file of the store.

    Args:
        layout: Of the store.
        path: Among its objects.
        digests: Also compare the digest of every tensor.

    Raises:
        OSError: It cannot be read now, which says nothing against it.
    """
    before = stamp(path)
    try:
        with open_document(path) as document:
            if not is_file_id(path.stem) or path != layout.path(document.id):
                raise VkvError(f"its id is {document.id}, which is not its name")
            what = describe(document) if is_entry(document) else None
            if digests:
                document.check_all()
    except (VkvError, FileNotFoundError) as exc:
        size = 0 if before is None else before[2]
        return Examined(path, before, size, problem=exc)
    assert before is not None
    return Examined(path, before, before[2], before[3] / 1e9, what)


def examine_key(layout: Layout, key: str) -> Examined:
    """Read the file of entry ``key``, every byte of it. Raises as ``examine``."""
    try:
        path = layout.path(key)
    except VkvError as exc:
        return Examined(Path(), None, problem=exc)
    return examine(layout, path, digests=True)


def damage(path: Path) -> Examined:
    """Compare every digest of a file; its summary is not made.

    A file that cannot be read now is not damaged.
    """
    before = stamp(path)
    try:
        with open_document(path) as document:
            document.check_all()
    except (VkvError, FileNotFoundError) as exc:
        return Examined(path, before, problem=exc)
    except OSError:
        pass
    return Examined(path, before)


def tokens_of(layout: Layout, row: Row) -> bytes:
    """Return the tokens of an entry from its file, little-endian u32.

    Raises:
        DamagedEntryError: They cannot be read, or have changed.
        OSError: The file cannot be read now.
    """
    try:
        path = layout.path(row["id"])
        return read_tokens(path, row["tokens_at"], row["tokens"], row["digest"])
    except (VkvError, FileNotFoundError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedEntryError(row, str(exc)) from exc
