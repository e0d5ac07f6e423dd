"""Keeping a store in order: collect, verify, make the index again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from sqlite3 import DatabaseError
from typing import TYPE_CHECKING

from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.layers import external_references
from vkv.store.local import entries as rows
from vkv.store.local import reconcile as files
from vkv.store.local.evict import Limits, evict
from vkv.store.local.index import Index
from vkv.store.local.layout import clear
from vkv.store.local.retrieve import discard
from vkv.store.results import Collected

if TYPE_CHECKING:
    from vkv.tools.validate import Finding


def collect(index: Index, limits: Limits, *, dry_run: bool) -> Collected:
    """Take out what is over the limits or useless; remove litter. See ``PromptStore.gc``."""
    layout, found = index.layout, Collected(dry_run)
    if not layout.root.exists():
        return found
    with index.write(dry=dry_run) as db:
        rows.purge(db)
        rejected, found.unread = files.enter_files(db, layout)
        found.files = [*layout.abandoned(), *rejected]
        before = rows.entries(db, layout)
        rows.take_out(db, files.useless(db, layout))
        found.over = evict(db, limits, layout.root)
        left = {entry.id for entry in rows.entries(db, layout)}
        found.entries = [entry for entry in before if entry.id not in left]
        found.freed = rows.total(db, dead=True) + sum(map(files.bytes_of, found.files))
        for path in () if dry_run else found.files:
            clear(path)
    return found


def verify(index: Index, *, deep: bool, remove: bool) -> Iterator[Finding]:
    """Findings on the index, then on every file. See ``PromptStore.verify``."""
    from vkv.tools.validate import Finding

    found, keys = _compare(index)
    for at, text in found:
        yield Finding("error", None, at, text)
    known = {at: text for at, text in found if at in keys}
    for key in known if remove else ():
        if not index.layout.path(key).exists() or any(_file_findings(index, key, deep)):
            discard(index, key, VkvError(known[key]))
    for key in sorted(set(keys) - known.keys()):
        yield from (wrong := list(_file_findings(index, key, deep)))
        if wrong and remove:
            discard(index, key, VkvError(wrong[0].message, rule=wrong[0].rule))


def _compare(index: Index) -> tuple[list[tuple[str, str]], list[str]]:
    """Where index and files differ, and the ids in the index.

    While nobody writes: names are given and taken away inside transactions only.
    """
    try:
        with index.write(dry=True) as db:
            return list(files.differences(db, index.layout)), rows.ids(db)
    except (VkvError, OSError):  # a store that can only be read
        with index.read() as db:
            return list(files.differences(db, index.layout)), rows.ids(db)


def _file_findings(index: Index, key: str, deep: bool) -> Iterator[Finding]:
    """What is wrong with a file; with ``deep``, also with what it uses of others."""
    from vkv.tools.validate import Finding, validate

    layout = index.layout
    try:
        with open_document(layout.path(key)) as document:
            places = [layout.path(base) for base in external_references(document.header)]
        found = validate(layout.path(key), deep=deep, search_paths=places if deep else ()).findings
    except FileNotFoundError:  # evicted meanwhile
        return
    except VkvError as exc:
        found = [Finding("error", exc.rule, exc.at, exc.message)]
    for f in found:
        if f.severity == "error" and (deep or f.rule != "H12"):
            yield Finding(f.severity, f.rule, f"{key}.{f.at}" if f.at else key, f.message)


def reindex(index: Index) -> list[Path]:
    """Make the index again; files that could not be entered. See ``PromptStore.reindex``."""
    try:
        with index.write() as db:
            return files.remake(db, index.layout)
    except VkvError as exc:
        if not isinstance(exc.__cause__, DatabaseError):
            raise
    index.reset()
    with index.write() as db:
        rejected, unread = files.enter_files(db, index.layout)
        return rejected + unread
