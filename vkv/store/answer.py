"""From a prompt to the entry that covers most of it, and to its live cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vkv.document import open_document
from vkv.errors import CacheError, ContainerError, MismatchError, UnsupportedError, VkvError
from vkv.store import lookup, rows
from vkv.store.entry import Entry, Found, Hit
from vkv.store.index import Index
from vkv.store.tree import DamagedError

_log = logging.getLogger("vkv.store")


def find(index: Index, tokens: bytes, owner: bytes) -> Found | None:
    """The entry that covers most of ``tokens``, but not the last of them.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
    """
    while True:
        try:
            with index.read() as db:
                match = lookup.longest(db, index.layout, owner, lookup.but_last(tokens))
                if match is None:
                    return None
                row, count = match
                return Found(rows.by_number(db, index.layout, row["n"]), count)
        except DamagedError as exc:
            if not discard(index, exc.row["id"], exc):
                return None


def get(index: Index, tokens: bytes, owner: bytes, model: Any, live: str) -> Hit | None:
    """The same as a live cache; a damaged entry is taken out and the next best tried.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
        model: The model itself, to be compared with the file, or ``None``.
        live: As ``vkv.load`` takes it.
    """
    ids = memoryview(tokens).cast("I").tolist()
    while (found := find(index, tokens, owner)) is not None:
        try:
            hit = _load(found, ids, model, live)
        except (MismatchError, UnsupportedError, CacheError) as exc:
            _log.warning("%s cannot be used: %s", found.entry.id, exc)
            return None
        except (VkvError, OSError) as exc:
            damage = _damage(found.entry.path, exc)
            if damage is None or not discard(index, found.entry.id, damage):
                _log.warning("%s cannot be read: %s", found.entry.id, exc)
                return None
        else:
            _touch(index, found.entry)
            return hit
    return None


def _load(found: Found, tokens: list[int], model: Any, live: str) -> Hit:
    from vkv.live.load import load

    prompt = load(found.entry.path, model=model, live=live)
    rest = prompt.resume(tokens)
    return Hit(found.entry, prompt.cache, len(tokens) - len(rest), rest)


def _damage(path: Path, reason: VkvError | OSError) -> VkvError | OSError | None:
    """What is wrong with the file itself, as far as ``reason`` does not say it.

    Too little memory, or too many open files, must not cost an entry.
    """
    if not isinstance(reason, ContainerError | OSError):
        return reason
    try:
        with open_document(path) as document:
            for name in document.header.tensors:
                document.check(name)
    except (VkvError, FileNotFoundError) as exc:
        return exc
    except OSError:
        return None
    return None


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
            query = "SELECT * FROM entries WHERE id = ? AND removed = 0"
            row = db.execute(query, (key,)).fetchone()
            if row is not None and not (gone and index.layout.path(key).exists()):
                rows.drop(db, row, reason)
    except (VkvError, OSError):  # a store that can only be read
        return False
    return True
