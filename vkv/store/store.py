"""``vkv.PromptStore``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkv.format.dependencies import FileResolver, SearchPath
from vkv.store.local import entries as rows
from vkv.store.local import maintenance as upkeep
from vkv.store.local import retrieve as answer
from vkv.store.local import units
from vkv.store.local.evict import Limits
from vkv.store.local.index import Index
from vkv.store.local.ingest import ancestor, copy_in, give, put_in, take_in
from vkv.store.local.layout import Layout
from vkv.store.results import Collected, Entry, Found, Hit, Stats

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm
    from vkv.caches.saving.request import CodecSpec, Progress
    from vkv.tools.validate import Report


class PromptStore:
    """Prompt caches on disk, found by their tokens; shared by any number of processes.

    Nothing is created before the first ``put``, and opening a store deletes nothing.
    Entries are named by their id or by the first four or more digits of it.

    Args:
        root: The directory; by default ``store`` in ``$VKV_CACHE_DIR``, else in
            ``$XDG_CACHE_HOME/vkv``, else in ``~/.cache/vkv``.
        max_bytes: What the files of all models together may take (``"20GB"``, or a
            number). ``put`` and ``gc`` evict what was used longest ago.
        max_age: How long an entry may go unused (``"30d"``, or seconds).
        min_free: What shall stay free on the disk (``"5GB"``, or a number).

    Attributes:
        root: The directory.
        limits: The limits, as numbers.

    Raises:
        VkvError: A limit is not a size, or not an age.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: str | int | None = None,
        max_age: str | float | None = None,
        min_free: str | int | None = None,
    ):
        self.root = Path(root) if root is not None else _default_root()
        self.limits = _limits(max_bytes, max_age, min_free)
        self._layout = Layout(self.root)
        self._index = Index(self._layout)

    def __repr__(self) -> str:
        return f"<PromptStore {str(self.root)!r}>"

    def put(
        self,
        cache: Sequence[Any],
        tokens: Any,
        *,
        model: Any,
        tokenizer: Any = None,
        codec: CodecSpec = "raw",
        metadata: Mapping[str, str] | None = None,
        search_paths: Iterable[SearchPath] = (),
        basis: SearchPath | None = None,
        progress: Progress | None = None,
    ) -> Entry:
        """Store a prompt's cache, whole or not at all.

        A conversation that grew stands on the longest stored one that it begins with:
        only what is new is written. Room is made by evicting others, never pinned ones.

        Args:
            cache: One mlx-lm cache per layer, holding exactly ``tokens``.
            tokens: Their ids, ``(T,)`` or ``(1, T)``.
            model: The model that filled it.
            tokenizer: The tokenizer that made ``tokens``.
            codec: As ``vkv.save`` takes it.
            metadata: Text to text, stored with it.
            search_paths: Where files are looked for that the store lacks and the entry depends on;
                they are taken in too. A cache that came from a file with a table of
                another one stands on that.
            basis: As ``vkv.save`` takes it. A copy stays in the store, as long as an entry
                stands on it.
            progress: Called with (bytes done, bytes in all).

        Returns:
            The entry. Putting the same again gives the same entry, and writes nothing.

        Raises:
            VkvError: As ``vkv.save``; or it does not fit into ``max_bytes`` beside
                what is pinned.
            OSError: The store cannot be written, or ``min_free`` cannot be kept.
        """
        from vkv import identity
        from vkv.caches.saving.save import save

        def write(path: Path, **standing: Any) -> None:
            save(
                path, cache, tokens=tokens, model=model, tokenizer=tokenizer, codec=codec,
                metadata=metadata, basis=basis, progress=progress, **standing,
            )  # fmt: skip

        parent = ancestor(self._index, identity.model_id(model), tokens, codec)
        resolver = FileResolver([*search_paths, *([] if basis is None else [basis])])
        return put_in(self._index, self.limits, write, parent, resolver)

    def add(
        self, path: str | os.PathLike[str], *, search_paths: Iterable[SearchPath] | None = None
    ) -> Entry:
        """Store a copy of a ``.vkv`` file, after checking every byte of it.

        What it stands on is copied in too, unless the store has it.

        Args:
            path: The file; it must name its model and hold its tokens.
            search_paths: Where the files it depends on are looked for; its own folder if not
                given.

        Returns:
            The entry.

        Raises:
            VkvError: The file is damaged or of no use here; or as ``put``.
            OSError: As ``put``, or the file cannot be read.
        """
        with self._layout.desk() as desk:
            own = desk / "new.vkv"
            resolver = FileResolver([Path(path).parent] if search_paths is None else search_paths)
            copy_in(Path(path), own, resolver)
            return take_in(self._index, self.limits, own, resolver)

    def find(self, tokens: Any, *, model: Any) -> Found | None:
        """The longest stored prefix of a prompt, without loading it.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model, or its id (bytes or hex).

        Returns:
            The entry and how many tokens it covers, at most all but the last;
            ``None`` if nothing stored begins like ``tokens``.

        Raises:
            VkvError: The index cannot be read.
        """
        from vkv import identity

        owner = identity.model_id(model)
        return answer.find(self._index, identity.token_bytes(tokens), owner)

    def get(self, tokens: Any, *, model: Any, live: LiveForm = "dense") -> Hit | None:
        """The longest stored prefix of a prompt, as a live cache.

        A damaged entry is taken out, with a line in the log of ``vkv.store``, and
        the next best one is tried: no file in the store makes this raise.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model that will go on, or its id (bytes or hex). A model is
                compared with the file as ``vkv.load`` does.
            live: As ``vkv.load`` takes it.

        Returns:
            The cache and the tokens still to be computed, at least one; ``None`` if
            nothing stored begins like ``tokens``.

        Raises:
            VkvError: The index cannot be read; or an argument is none of those above.
        """
        from vkv import identity
        from vkv.caches.loading.load import check_live

        check_live(live)
        check = None if isinstance(model, bytes | str) else model
        owner = identity.model_id(model)
        return answer.get(self._index, identity.token_bytes(tokens), owner, check, live)

    def ls(self) -> list[Entry]:
        """All entries, the one used last first."""
        with self._index.read() as db:
            return rows.entries(db, self._layout)

    def entries(self, *ids: str) -> list[Entry]:
        """Entries by id. Raises as ``rm``."""
        with self._index.read() as db:
            numbers = [rows.resolve(db, key) for key in ids]
            return [rows.by_number(db, self._layout, n) for n in numbers]

    def stats(self) -> Stats:
        """How much there is. ``bytes`` is the size of all files together."""
        with self._index.read() as db:
            return rows.stats(db, self.root, self.limits.max_bytes)

    def rm(self, *ids: str, dry_run: bool = False) -> Collected:
        """Remove entries, also pinned ones; all or none.

        The bytes of a file that others stand on stay until those are gone.

        Args:
            ids: Of the entries.
            dry_run: Only say what would go.

        Returns:
            What was removed, or would be.

        Raises:
            VkvError: No entry, or more than one, has such an id.
        """
        with self._index.write(dry=dry_run) as db:
            numbers = [*dict.fromkeys(rows.resolve(db, key) for key in ids)]
            removed = [rows.by_number(db, self._layout, n) for n in numbers]
            return Collected(dry_run, removed, freed=rows.take_out(db, numbers))

    def pin(self, *ids: str) -> list[Entry]:
        """Exempt entries from eviction; which they are. Raises as ``rm``."""
        return self._set_pinned(ids, True)

    def unpin(self, *ids: str) -> list[Entry]:
        """Let entries be evicted again; which they are. Raises as ``rm``."""
        return self._set_pinned(ids, False)

    def _set_pinned(self, ids: Sequence[str], value: bool) -> list[Entry]:
        with self._index.write() as db:
            numbers = [rows.resolve(db, key) for key in ids]
            for n in numbers:
                db.execute("UPDATE entries SET pinned = ? WHERE n = ?", (value, n))
            return [rows.by_number(db, self._layout, n) for n in numbers]

    def gc(
        self,
        *,
        max_bytes: str | int | None = None,
        max_age: str | float | None = None,
        min_free: str | int | None = None,
        dry_run: bool = False,
    ) -> Collected:
        """Remove what is over the limits, what this build cannot read, and litter.

        Whole files that a crash left out of the index are entered.

        Args:
            max_bytes: Instead of the store's own limit, likewise the next two.
            max_age: Of use.
            min_free: On the disk.
            dry_run: Only say what would go.

        Returns:
            What was removed, or would be.

        Raises:
            VkvError: A limit is not a size, or not an age.
            OSError: The store cannot be written.
        """
        own, asked = self.limits, _limits(max_bytes, max_age, min_free)
        limits = Limits(*(_either(getattr(asked, n), getattr(own, n)) for n in _LIMITS))
        return upkeep.collect(self._index, limits, dry_run=dry_run)

    def verify(self, *, deep: bool = False, remove: bool = False) -> Report:
        """Check the index against the files, and every byte of every file.

        Args:
            deep: Also decode every tensor.
            remove: Take out the entries whose files are damaged or gone, and what stands
                on them, with a line each in the log of ``vkv.store``.

        Returns:
            Every finding, as ``vkv.validate`` gives it, with the entry's id.

        Raises:
            OSError: A file cannot be read.
        """
        from vkv.tools.validate import Report

        return Report(
            str(self.root), deep, list(upkeep.verify(self._index, deep=deep, remove=remove))
        )

    def reindex(self) -> list[Path]:
        """Make the index again from the files.

        Pins and times of use, which no file tells, are kept as far as the old index
        can be read.

        Returns:
            Files that could not be entered.

        Raises:
            OSError: The store cannot be written.
        """
        return upkeep.reindex(self._index)

    def export(self, key: str, path: str | os.PathLike[str]) -> Entry:
        """Write an entry to a file that stands alone; an existing one is replaced in one step.

        Args:
            key: Its id.
            path: The file to write.

        Returns:
            The entry.

        Raises:
            VkvError: No entry, or more than one, has such an id.
            OSError: The file cannot be written.
        """
        with self._index.read() as db:
            entry = rows.by_number(db, self._layout, rows.resolve(db, key))
        give(self._layout, entry, Path(path))
        return entry


_LIMITS = ("max_bytes", "max_age", "min_free")


def _limits(
    max_bytes: str | int | None, max_age: str | float | None, min_free: str | int | None
) -> Limits:
    return Limits(
        None if max_bytes is None else units.size(max_bytes),
        None if max_age is None else units.age(max_age),
        None if min_free is None else units.size(min_free),
    )


def _either(asked: Any, own: Any) -> Any:
    return own if asked is None else asked


def _default_root() -> Path:
    from vkv._paths import cache_dir

    return cache_dir() / "store"
