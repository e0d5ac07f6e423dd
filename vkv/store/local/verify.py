"""Compare the index with the files, and check every byte of every file."""

from __future__ import annotations

from collections.abc import Iterator
from sqlite3 import Connection
from typing import TYPE_CHECKING

from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.file_id import is_file_id
from vkv.format.layers import external_references
from vkv.store.local import entries
from vkv.store.local.file_check import Examined, stamp
from vkv.store.local.index import Index
from vkv.store.local.layout import Layout
from vkv.store.local.reconcile import in_place, size_of
from vkv.store.local.repair import discard
from vkv.store.local.schema import DEAD, LIVE, QUARANTINED

if TYPE_CHECKING:
    from vkv.tools.validate import Finding

#: Seconds to wait for writers; names are given and taken away while one has the lock.
PATIENCE = 5.0
#: Rules on values, which a model can break: a file that breaks them is neither damaged nor
#: refused by ``vkv.load``, so it is not removed for them.
VALUE_RULES = frozenset({"D2"})


def verify(index: Index, *, deep: bool, remove: bool) -> Iterator[Finding]:
    """Yield findings on the index, then on every file. See ``PromptStore.verify``."""
    from vkv.tools.validate import Finding

    found, keys = _compare(index)
    for at, text in found:
        yield Finding("error", None, at, text)
    listed = {at for at, _ in found if at in keys}
    for key in keys:
        wrong = list(_file_findings(index, key, deep))
        if key not in listed:
            yield from wrong
        if remove:
            _remove(index, key, wrong, [text for at, text in found if at == key])


def _remove(index: Index, key: str, wrong: list[Finding], index_says: list[str]) -> None:
    """Take out an entry whose file is damaged, gone, or refused by ``vkv.load``."""
    path = index.layout.path(key)
    before = stamp(path)
    reasons = [VkvError(f.message, rule=f.rule) for f in wrong if f.rule not in VALUE_RULES]
    if before is None and index_says:
        reasons.append(VkvError(index_says[0]))
    if reasons:
        discard(index, Examined(path, before, problem=reasons[0]), key)


def _compare(index: Index) -> tuple[list[tuple[str, str]], list[str]]:
    """Return where index and files differ, and the ids in the index."""
    try:
        with index.write(dry=True, patience=PATIENCE) as db:
            return list(differences(db, index.layout)), entries.ids(db)
    except (VkvError, OSError):  # a store that is busy, or can only be read
        with index.read() as db:
            return list(differences(db, index.layout)), entries.ids(db)


def _file_findings(index: Index, key: str, deep: bool) -> Iterator[Finding]:
    """Yield what is wrong with a file; with ``deep``, also with what it uses of others."""
    from vkv.tools.validate import Finding, validate

    layout = index.layout
    try:
        with open_document(layout.path(key)) as document:
            used = [layout.path(other) for other in external_references(document.header)]
        found = validate(layout.path(key), deep=deep, search_paths=used if deep else ()).findings
    except FileNotFoundError:  # evicted meanwhile
        return
    except VkvError as exc:
        found = [Finding("error", exc.rule, exc.at, exc.message)]
    for f in found:
        if f.severity == "error" and (deep or f.rule != "H12"):
            yield Finding(f.severity, f.rule, f"{key}.{f.at}" if f.at else key, f.message)


def differences(db: Connection, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield where index and files differ, as (id or path, what)."""
    for (problem,) in db.execute("PRAGMA quick_check").fetchall():
        if problem != "ok":
            yield "index", problem
    yield from _files_missing(db, layout)
    yield from _files_unlisted(db, layout)
    yield from _quarantine(db)
    yield from _tree(db)


def _files_missing(db: Connection, layout: Layout) -> Iterator[tuple[str, str]]:
    query = "SELECT id, size FROM entries WHERE removed != ? ORDER BY id"
    listed = dict(db.execute(query, (DEAD,)).fetchall())
    for key in [key for key in listed if not is_file_id(key)]:
        del listed[key]
        yield "index", f"the id {str(key)[:80]!r}, expected 64 hex digits; gc takes it out"
    for key, size in listed.items():
        found = size_of(layout.path(key))
        if found != size:
            yield key, f"{'no file' if found is None else f'{found} bytes'}, expected {size} bytes"
    query = "SELECT e.id, dependency FROM dependencies JOIN entries e ON e.n = entry ORDER BY 1, 2"
    for key, dependency in db.execute(query).fetchall():
        if dependency not in listed:
            yield key, f"depends on {dependency}, which is missing"


def _files_unlisted(db: Connection, layout: Layout) -> Iterator[tuple[str, str]]:
    listed = {key for (key,) in db.execute("SELECT id FROM entries")}
    for path in layout.files():
        if not in_place(layout, path) or path.stem not in listed:
            yield str(path), "not in the index; gc lists it, or removes it if it is no entry"
    for path in layout.abandoned():
        yield str(path), "left by a writer that died; gc removes it"


def _quarantine(db: Connection) -> Iterator[tuple[str, str]]:
    query = "SELECT id, reason FROM entries WHERE removed = ? ORDER BY id"
    for key, reason in db.execute(query, (QUARANTINED,)).fetchall():
        yield key, f"put aside, refused by {reason}; rm removes it"


def _tree(db: Connection) -> Iterator[tuple[str, str]]:
    query = """
        SELECT e.id FROM entries e LEFT JOIN nodes n ON n.id = e.node
        WHERE e.removed = ? AND n.depth IS NOT e.tokens AND e.tokens > 0
    """
    for (key,) in db.execute(query, (LIVE,)).fetchall():
        yield key, "cannot be found by its tokens; gc enters it anew"
    query = """
        SELECT count(*) FROM nodes n WHERE NOT EXISTS (SELECT 1 FROM entries WHERE node = n.id)
        AND NOT EXISTS (SELECT 1 FROM points WHERE node = n.id)
        AND (SELECT count(*) FROM nodes c WHERE c.parent = n.id) < 2
    """
    if count := db.execute(query).fetchone()[0]:
        yield "index", f"{count} nodes lead to no entry; reindex builds a new one"
    query = """
        SELECT count(*) FROM points p LEFT JOIN nodes n ON n.id = p.node
        LEFT JOIN entries e ON e.n = p.entry
        WHERE n.id IS NULL OR e.removed IS NOT ? OR n.depth >= e.tokens
    """
    if count := db.execute(query, (LIVE,)).fetchone()[0]:
        yield "index", f"{count} checkpoints belong to no entry; reindex builds a new one"
