"""The index held against the files. Inside a transaction of the caller's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.file_id import is_file_id
from vkv.store.local import entries as rows
from vkv.store.local.layout import Layout
from vkv.store.local.summary import is_entry, known_needs, of

_log = logging.getLogger("vkv.store")


def enter_files(db: Connection, layout: Layout) -> tuple[list[Path], list[Path]]:
    """Enter every file that is not in the index; those that are no entries, in order.

    Those too that cannot be read now: nothing is known of them, so they stay, and so
    does what they may stand on.

    A writer that died between the file's last step and the index left a whole file.
    A file that stands on others which are not there is no entry either.
    """
    listed = {key for (key,) in db.execute("SELECT id FROM entries")}
    rejected: list[Path] = []
    unread: list[Path] = []
    for path in layout.files():
        if path.stem in listed and _in_place(layout, path):
            continue
        try:
            if not _enter(db, layout, path):
                rejected.append(path)
        except OSError as exc:
            _log.warning("%s cannot be read and stays: %s", path, exc)
            unread.append(path)
    return rejected + ([] if unread else _strike(db, layout)), unread


def _in_place(layout: Layout, path: Path) -> bool:
    return is_file_id(path.stem) and path == layout.path(path.stem)


def _enter(db: Connection, layout: Layout, path: Path) -> bool:
    try:
        with open_document(path) as document:
            if path != layout.path(document.id):
                raise VkvError(f"its id is {document.id}")
            what = of(document) if is_entry(document) else None
            key, size = document.id, document.size
    except (VkvError, FileNotFoundError) as exc:
        _log.warning("%s is no entry: %s", path, exc)
        return False
    if what is not None:  # outside: what is wrong with the index is not the file's fault
        rows.add(db, layout, what, path.stat().st_mtime)
    else:
        rows.hold(db, key, size)
    return True


def _strike(db: Connection, layout: Layout) -> list[Path]:
    """Leave out files that lack one they stand on, and those that only others could use."""
    query = "SELECT DISTINCT entry FROM stands WHERE base NOT IN (SELECT id FROM entries)"
    lacking = [n for (n,) in db.execute(query).fetchall()]
    rows.take_out(db, lacking)
    held = [n for (n,) in db.execute("SELECT n FROM entries WHERE tree = 0").fetchall()]
    for n in held:
        rows.release(db, n)
    query = "DELETE FROM entries WHERE n = ? AND removed = ? RETURNING id"
    gone = [(n, rows.DEAD) for n in (*lacking, *held)]
    struck = [key for pair in gone for (key,) in db.execute(query, pair).fetchall()]
    for key in struck:
        _log.warning("%s is no entry, and none stands on it", key)
    return [layout.path(key) for key in struck]


def useless(db: Connection, layout: Layout) -> list[int]:
    """Entries without their file, unpinned ones that this build cannot read, dependents.

    The files are asked; those of which the index speaks wrongly are entered anew.
    """
    known = known_needs()
    query = """
        SELECT e.*, coalesce(t.needs, '') AS needs FROM entries e
        LEFT JOIN trees t ON t.id = -e.tree WHERE e.removed < 2
    """
    found = []
    for row in db.execute(query).fetchall():
        foreign = not row["pinned"] and not known.issuperset(str(row["needs"]).split())
        try:
            suspect = foreign or _size(layout.path(row["id"])) != row["size"]
            if suspect and not _usable(db, layout, row, known):
                found += [row["n"], *rows.dependents(db, row["n"])]
        except OSError as exc:
            _log.warning("%s cannot be read and stays: %s", row["id"], exc)
    return found


def _usable(db: Connection, layout: Layout, row: Row, known: set[str]) -> bool:
    """Whether the file of a suspect row is sound and this build can read it."""
    if row["tree"] == 0 and row["removed"] == rows.HELD:
        return rows.hold_again(db, layout, row["id"])
    if (what := rows.ask(layout, row["id"])) is None:
        return False
    if not known.issuperset(what.needs.split()):
        return bool(row["pinned"])
    held = row["removed"] == rows.HELD
    rows.mend(db, layout, row)
    if held:  # taken out, and only stood on: so it stays
        rows.take_out(db, [row["n"]])
    return True


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(_size(file) or 0 for file in files)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def remake(db: Connection, layout: Layout) -> list[Path]:
    """Empty the index and enter every file anew; those that cannot be.

    What no file tells (pins, uses, what was taken out) is carried over by id.
    """
    query = "SELECT created, used, uses, pinned, removed, id FROM entries"
    known = db.execute(query).fetchall()
    for table in ("entries", "nodes", "trees", "stands"):
        db.execute(f"DELETE FROM {table}")
    rejected, unread = enter_files(db, layout)
    for *values, removed, key in known:
        rows.keep(db, key, *values)
        if removed in (rows.HELD, rows.DEAD):
            query = "SELECT n FROM entries WHERE id = ?"
            rows.take_out(db, [n for (n,) in db.execute(query, (key,)).fetchall()])
    return rejected + unread


def differences(db: Connection, layout: Layout) -> Iterator[tuple[str, str]]:
    """Where index and files differ, as (which, what)."""
    for (problem,) in db.execute("PRAGMA quick_check").fetchall():
        if problem != "ok":
            yield "index", problem
    listed = dict(db.execute("SELECT id, size FROM entries WHERE removed < 2").fetchall())
    dying = {key for (key,) in db.execute("SELECT id FROM entries WHERE removed = 2").fetchall()}
    for key in [key for key in listed if not is_file_id(key)]:
        del listed[key]
        yield "index", f"the id {str(key)[:80]!r}, expected 64 hex digits; gc takes it out"
    for key, size in sorted(listed.items()):
        found = _size(layout.path(key))
        if found != size:
            yield key, f"{'no file' if found is None else f'{found} bytes'}, expected {size} bytes"
    query = "SELECT e.id, base FROM stands JOIN entries e ON e.n = entry ORDER BY e.id, base"
    for key, base in db.execute(query).fetchall():
        if base not in listed:
            yield key, f"stands on {base}, which is not there"
    for path in layout.files():
        if not _in_place(layout, path) or path.stem not in listed.keys() | dying:
            yield str(path), "stands in no index; gc enters it, or removes it if it is no entry"
    for path in layout.abandoned():
        yield str(path), "left by a writer that died; gc removes it"
    query = """
        SELECT e.id FROM entries e LEFT JOIN nodes n ON n.id = e.node
        WHERE e.removed = 0 AND n.depth IS NOT e.tokens AND e.tokens > 0
    """
    for (key,) in db.execute(query).fetchall():
        yield key, "cannot be found by its tokens; reindex enters it anew"
    query = """
        SELECT count(*) FROM nodes n WHERE NOT EXISTS (SELECT 1 FROM entries WHERE node = n.id)
        AND (SELECT count(*) FROM nodes c WHERE c.parent = n.id) < 2
    """
    if count := db.execute(query).fetchone()[0]:
        yield "index", f"{count} nodes lead nowhere; reindex makes it again"
