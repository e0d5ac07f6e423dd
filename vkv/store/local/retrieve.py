"""From a prompt to the entry that covers most of it, and to its live cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkv.errors import (
    CacheError,
    CodecError,
    HeaderError,
    MismatchError,
    UnsupportedError,
    VkvError,
)
from vkv.format.document import open_document
from vkv.store.local import entries as rows
from vkv.store.local import lookup
from vkv.store.local.index import Index
from vkv.store.local.ingest import bases
from vkv.store.local.prefix_tree import DamagedError
from vkv.store.results import Entry, Found, Hit

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm

_log = logging.getLogger("vkv.store")


def find(index: Index, tokens: bytes, owner: bytes) -> Found | None:
    """The entry that covers most of ``tokens``, but not the last of them.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
    """
    mended: set[int] = set()
    while True:
        try:
            with index.read() as db:
                match = lookup.longest(db, index.layout, owner, lookup.but_last(tokens))
                if match is None:
                    return None
                row, count = match
                return Found(rows.by_number(db, index.layout, row["n"]), count)
        except DamagedError as exc:
            if (n := exc.row["n"]) in mended:
                raise VkvError(f"entry {n} cannot be mended; {rows.HINT}") from exc
            mended.add(n)
            if not _mend(index, "n", n, exc):
                return None
        except OSError as exc:  # not allowed, or too many open files: no reason to drop it
            _log.warning("a prompt cannot be searched for: %s", exc)
            return None


def get(index: Index, tokens: bytes, owner: bytes, model: Any, live: LiveForm) -> Hit | None:
    """The same as a live cache; a damaged entry is taken out and the next best tried.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
        model: The model itself, to be compared with the file, or ``None``.
        live: As ``vkv.load`` takes it.
    """
    ids = memoryview(tokens).cast("I").tolist()
    wrong: set[str] = set()
    while (found := find(index, tokens, owner)) is not None:
        try:
            if not _same(found.entry, owner):
                if found.entry.id in wrong or not _mend(
                    index, "id", found.entry.id, VkvError("the file is another one")
                ):
                    return None
                wrong.add(found.entry.id)
                continue
            hit = _load(index, found, ids, model, live)
        except (MismatchError, UnsupportedError, CacheError) as exc:
            _log.warning("%s cannot be used: %s", found.entry.id, exc)
            return None
        except (VkvError, OSError) as exc:
            damaged = _damaged(index, found.entry, exc)
            if not damaged or not all(discard(index, key, why) for key, why in damaged):
                _log.warning("%s cannot be read: %s", found.entry.id, exc)
                return None
        else:
            _touch(index, found.entry)
            return hit
    return None


def _same(entry: Entry, owner: bytes) -> bool:
    """Whether a file is the one that the index says, and of the model asked for."""
    with open_document(entry.path) as document:
        model = document.header.model
        return document.id == entry.id and model is not None and model.id == owner


def _load(index: Index, found: Found, tokens: list[int], model: Any, live: LiveForm) -> Hit:
    from vkv.caches.loading.load import load

    prompt = load(
        found.entry.path, model=model, live=live, search_paths=bases(index.layout, found.entry)
    )
    rest = prompt.resume(tokens)
    return Hit(found.entry, prompt.cache, len(tokens) - len(rest), rest)


def _damaged(
    index: Index, entry: Entry, reason: VkvError | OSError
) -> list[tuple[str, VkvError | OSError]]:
    """Which files make an entry unreadable, and what is wrong with each.

    All their bytes are looked at: too little memory, or too many open files, must not
    cost an entry.
    """
    found = [(key, _damage(index.layout.path(key))) for key in (entry.id, *entry.files)]
    damaged = [(key, damage) for key, damage in found if damage is not None]
    sure = isinstance(reason, HeaderError | CodecError)
    return damaged or ([(entry.id, reason)] if sure else [])


def _damage(path: Path) -> VkvError | OSError | None:
    try:
        with open_document(path) as document:
            document.check_all()
    except (VkvError, FileNotFoundError) as exc:
        return exc
    except OSError:
        return None
    return None


def _mend(index: Index, column: str, value: int | str, reason: Exception) -> bool:
    """Enter the file of a damaged row anew; if it is damaged itself, take it out.

    Returns:
        As ``discard``.
    """
    try:
        with index.write() as db:
            row = db.execute(f"SELECT * FROM entries WHERE {column} = ?", (value,)).fetchone()
            if row is not None and rows.mend(db, index.layout, row) is None:
                rows.drop(db, row, reason)
    except (VkvError, OSError):  # a store that can only be read
        return False
    return True


def _touch(index: Index, entry: Entry) -> None:
    try:
        with index.write() as db:
            rows.touch(db, entry.id)
    except (VkvError, OSError) as exc:  # a store that can only be read
        _log.debug("the use of %s is not noted: %s", entry.id, exc)


def discard(index: Index, key: str, reason: Exception) -> bool:
    """Take out an entry whose file is damaged or gone.

    Returns:
        Whether it could be taken out, so that a new search finds another.
    """
    gone = isinstance(reason.__cause__ or reason, FileNotFoundError)
    try:
        with index.write() as db:
            query = "SELECT * FROM entries WHERE id = ? AND removed < 2"
            row = db.execute(query, (key,)).fetchone()
            if row is not None and not (gone and index.layout.path(key).exists()):
                rows.drop(db, row, reason)
    except (VkvError, OSError):  # a store that can only be read
        return False
    return True
