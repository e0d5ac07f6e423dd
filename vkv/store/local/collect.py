"""Collect what is of no use in a store: entries over a limit or unreadable, and litter.

Files are read between transactions, so that other processes can write meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from sqlite3 import Connection

from vkv.errors import StoreUnavailableError, VkvError
from vkv.store.local import entries, reconcile, removal
from vkv.store.local.evict import evict
from vkv.store.local.file_check import Examined
from vkv.store.local.index import Index, Rehearsal
from vkv.store.local.layout import clear
from vkv.store.local.limits import Limits
from vkv.store.local.reconcile import Survey
from vkv.store.local.repair import repair
from vkv.store.results import Collected

#: Files that are read before they are listed, together, in one transaction.
BATCH = 64


def collect(index: Index, limits: Limits, *, dry_run: bool) -> Collected:
    """Take out what is over the limits or useless; remove litter. See ``PromptStore.gc``."""
    if not index.layout.root.exists():
        return Collected(dry_run)
    if dry_run:
        with index.rehearsal() as rehearsal:
            return _Collector(rehearsal, limits, dry_run).run()
    try:
        return _Collector(index, limits, dry_run).run()
    except StoreUnavailableError as exc:
        if not exc.no_space:
            raise
        _free_space(index, limits)
        return _Collector(index, limits, dry_run).run()


class _Collector:
    """Collect on an index, or rehearse it on a copy of one."""

    def __init__(self, index: Index | Rehearsal, limits: Limits, dry_run: bool):
        self._index, self._layout, self._limits = index, index.layout, limits
        self._done, self._found = Collected(dry_run), Survey()

    def run(self) -> Collected:
        """Do one step after another; each has a transaction of its own."""
        with self._index.write() as db:
            removal.purge(db)
        self._list_files()
        self._strike()
        self._settle_suspects()
        self._evict()
        self._clear(self._layout.abandoned())
        if isinstance(self._index, Index):
            for key in self._found.unplaced:
                repair(self._index, key, VkvError("its tokens cannot be read"))
        self._done.unread = self._found.unread
        return self._done

    def _list_files(self) -> None:
        with self._index.read() as db:
            paths = reconcile.unlisted(db, self._layout)
        files = reconcile.survey(self._layout, paths, self._found)
        while batch := list(islice(files, BATCH)):
            with self._index.write() as db:
                for file in batch:
                    reconcile.enter(db, self._layout, file, self._found)

    def _strike(self) -> None:
        if not self._found.unread:
            with self._index.write() as db, self._removing(db):
                reconcile.strike(db, self._layout, self._found)

    def _settle_suspects(self) -> None:
        with self._index.read() as db:
            rows = reconcile.suspects(db, self._layout)
        for row in rows:
            if (file := reconcile.judge(self._layout, row)) is not None:
                with self._index.write() as db, self._removing(db):
                    reconcile.settle(db, self._layout, row, file, self._found)

    def _evict(self) -> None:
        with self._index.write() as db:
            with self._removing(db):
                self._done.over = evict(db, self._limits, self._layout.root)
            self._clear(self._unlisted(db, self._found.rejected))

    @contextlib.contextmanager
    def _removing(self, db: Connection) -> Iterator[None]:
        """Note the entries that are taken out inside the block, and their bytes."""
        before = entries.all_entries(db, self._layout)
        dead = entries.total_bytes(db, dead=True)
        yield
        left = entries.live_ids(db)
        self._done.entries += [entry for entry in before if entry.id not in left]
        self._done.freed += entries.total_bytes(db, dead=True) - dead

    def _unlisted(self, db: Connection, files: list[Examined]) -> Iterator[Path]:
        """Yield rejected files that are still the same and that no process has listed since."""
        query = "SELECT 1 FROM entries WHERE id = ?"
        for file in files:
            listed = db.execute(query, (file.path.stem,)).fetchone()
            if file.unchanged and not (listed and reconcile.in_place(self._layout, file.path)):
                yield file.path

    def _clear(self, paths: Iterable[Path]) -> None:
        """Remove files or folders, or only count them."""
        for path in paths:
            self._done.files.append(path)
            self._done.freed += reconcile.bytes_of(path)
            if not self._done.dry_run:
                clear(path)


def _free_space(index: Index, limits: Limits) -> None:
    """Remove the files of what ``collect`` would evict, before the index says so.

    On a full disk the index cannot be written until something is gone. An entry without
    its file is a miss, and the next ``gc`` takes it out.
    """
    with index.write(dry=True) as db:
        evict(db, limits, index.layout.root)
        removal.remove_files(index.layout, removal.dead_ids(db))


def remove(index: Index, ids: Iterable[str], *, dry_run: bool) -> Collected:
    """Remove entries, all or none. See ``PromptStore.rm``."""
    keys = tuple(ids)
    try:
        return _remove(index, keys, dry_run)
    except StoreUnavailableError as exc:
        if not exc.no_space:
            raise
    with index.write(dry=True) as db:
        removal.take_out(db, [entries.resolve(db, key) for key in keys])
        removal.remove_files(index.layout, removal.dead_ids(db))
    return _remove(index, keys, dry_run)


def _remove(index: Index, keys: tuple[str, ...], dry_run: bool) -> Collected:
    with index.write(dry=dry_run) as db:
        numbers = [*dict.fromkeys(entries.resolve(db, key) for key in keys)]
        removed = [entries.by_number(db, index.layout, n) for n in numbers]
        return Collected(dry_run, removed, freed=removal.take_out(db, numbers))
