"""Bring index and files together: list whole files, find entries whose files are of no use.

Reading files (``survey``, ``suspects``) is apart from changing the index, so that a caller
can do the first without the lock that the second needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Connection, Row

from vkv.errors import VkvError
from vkv.format.file_id import is_file_id
from vkv.store.local import entries, listing, removal
from vkv.store.local.file_check import Examined, examine, examine_key, stamp
from vkv.store.local.layout import Layout
from vkv.store.local.schema import DEAD, LIVE, NO_TREE, QUARANTINED
from vkv.store.local.summary import known_needs

_log = logging.getLogger("vkv.store")


@dataclass(slots=True)
class Survey:
    """Collect what was found among the files.

    Attributes:
        rejected: Files that are no entries and that none depends on.
        unread: Files that could not be read now; nothing is known of them, so they stay.
        unplaced: Ids for ``repair``.
    """

    rejected: list[Examined] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)


def unlisted(db: Connection, layout: Layout) -> list[Path]:
    """Return the files that the index does not list, or lists without a place in a tree.

    A writer that died between the last step of a file and the index leaves a whole file.
    """
    query = "SELECT id FROM entries WHERE NOT (removed = ? AND node IS NULL)"
    listed = {key for (key,) in db.execute(query, (LIVE,))}
    return [
        path for path in layout.files() if path.stem not in listed or not in_place(layout, path)
    ]


def in_place(layout: Layout, path: Path) -> bool:
    """Return whether a file stands where its name, an id, belongs."""
    return is_file_id(path.stem) and path == layout.path(path.stem)


def survey(layout: Layout, paths: list[Path], found: Survey) -> Iterator[Examined]:
    """Read files, and yield those that can be listed."""
    for path in paths:
        try:
            examined = examine(layout, path)
        except OSError as exc:
            _log.warning("%s cannot be read and stays: %s", path, exc)
            found.unread.append(path)
            continue
        if examined.problem is None or (examined.breaks_rule and in_place(layout, path)):
            yield examined
        elif examined.breaks_rule:
            _log.warning("%s is no entry and stays: %s", path, examined.problem)
        elif examined.stamp is not None:
            _log.warning("%s is no entry: %s", path, examined.problem)
            found.rejected.append(examined)


def enter(db: Connection, layout: Layout, file: Examined, found: Survey) -> None:
    """List a file that was read: as an entry, or for others that may depend on it."""
    if not file.unchanged:
        return
    if file.problem is not None:
        listing.put_aside(db, file.path.stem, file.size, file.problem)
    elif file.description is None:
        listing.retain(db, file.path.stem, file.size)
    else:
        listing.add(db, layout, file.description, file.modified, found.unplaced)


def list_files(db: Connection, layout: Layout) -> Survey:
    """List every file that the index lacks, in one transaction of the caller."""
    found = Survey()
    for file in survey(layout, unlisted(db, layout), found):
        enter(db, layout, file, found)
    if not found.unread:
        strike(db, layout, found)
    return found


def list_points(db: Connection, layout: Layout) -> None:
    """List the checkpoints of all entries, in an index of a build that knew none."""
    query = """
        SELECT e.n, e.id, e.tree FROM entries e JOIN trees t ON t.id = -e.tree
        WHERE e.removed = ? AND NOT t.trims AND instr(t.needs, '+checkpoints')
    """
    for number, key, tree in db.execute(query, (LIVE,)).fetchall():
        try:
            file = examine(layout, layout.path(key))
        except (OSError, VkvError):  # its checkpoints are not found; the entry is
            continue
        if file.description is not None:
            unplaced: list[str] = []
            listing.place_points(db, layout, tree, number, file.description, unplaced)


def strike(db: Connection, layout: Layout, found: Survey) -> None:
    """Delete the rows of files that lack a dependency, or that only others could use.

    Call it only if every file could be read.
    """
    query = (
        "SELECT DISTINCT entry FROM dependencies WHERE dependency NOT IN (SELECT id FROM entries)"
    )
    lacking = [n for (n,) in db.execute(query).fetchall()]
    removal.take_out(db, lacking)
    only_dependencies = "SELECT n FROM entries WHERE tree = ?"
    unneeded = [n for (n,) in db.execute(only_dependencies, (NO_TREE,)).fetchall()]
    for n in unneeded:
        removal.release(db, n)
    query = "DELETE FROM entries WHERE n = ? AND removed = ? RETURNING id"
    gone = [(n, DEAD) for n in (*lacking, *unneeded)]
    for key in [key for pair in gone for (key,) in db.execute(query, pair).fetchall()]:
        _log.warning("%s is no entry, and none depends on it", key)
        path = layout.path(key)
        found.rejected.append(Examined(path, stamp(path)))


def suspects(db: Connection, layout: Layout) -> list[Row]:
    """Return rows whose file is missing or of another size, or that this build cannot read."""
    known = known_needs()
    query = """
        SELECT e.*, coalesce(t.needs, '') AS needs FROM entries e
        LEFT JOIN trees t ON t.id = -e.tree WHERE e.removed != 2
    """
    return [
        row
        for row in db.execute(query).fetchall()
        if not (row["pinned"] or known.issuperset(str(row["needs"]).split()))
        or (is_file_id(row["id"]) and size_of(layout.path(row["id"])) != row["size"])
    ]


def judge(layout: Layout, row: Row) -> Examined | None:
    """Read the file of a suspect row, every byte; ``None`` if it cannot be read now."""
    try:
        return examine_key(layout, row["id"])
    except OSError as exc:
        _log.warning("%s cannot be read and stays: %s", row["id"], exc)
        return None


def settle(db: Connection, layout: Layout, row: Row, file: Examined, found: Survey) -> None:
    """Correct the row of a sound file that this build can read; take out any other."""
    now = db.execute("SELECT * FROM entries WHERE n = ?", (row["n"],)).fetchone()
    if now is None or tuple(now) != tuple(row)[: len(now)]:
        return
    if file.stamp is not None and not file.unchanged:
        return
    if file.problem is not None and file.breaks_rule:
        removal.refuse(db, row, file.problem)
    elif file.problem is None and file.description is None:
        listing.retain(db, row["id"], file.size)
    elif file.description is not None and _usable(row, file):
        found.unplaced += listing.relist(db, layout, now, file.description)
    else:
        removal.take_out(db, [row["n"], *entries.dependents(db, row["n"])])


def retry_refused(db: Connection, layout: Layout) -> None:
    """List the entries anew that another build has put aside; this one may know their rules.

    One that cannot be loaded is put aside again when it is asked for.
    """
    query = "SELECT * FROM entries WHERE removed = ? AND reason NOT LIKE ?"
    for row in db.execute(query, (QUARANTINED, f"{removal.BUILD}%")).fetchall():
        file = judge(layout, row)
        if file is None or not (file.unchanged and is_file_id(row["id"])):
            continue
        if file.description is not None:
            listing.relist(db, layout, row, file.description)
        elif file.problem is not None and file.breaks_rule:
            removal.quarantine(db, row, str(file.problem))


def _usable(row: Row, file: Examined) -> bool:
    assert file.description is not None
    return bool(row["pinned"]) or known_needs().issuperset(file.description.needs.split())


def size_of(path: Path) -> int | None:
    """Return the bytes of a file; ``None`` if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def bytes_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(size_of(file) or 0 for file in files)
