"""``vkv.PromptStore``: prompt caches on disk, found by their tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vkv.format.dependencies import FileResolver, SearchPath
from vkv.store.local import collect, entries, ingest, rebuild, retrieve
from vkv.store.local.index import Index
from vkv.store.local.layout import Layout, default_root
from vkv.store.local.limits import Limits
from vkv.store.local.summary import with_names
from vkv.store.notebook import store_table
from vkv.store.results import Collected, Entry, Found, Hit, Stats

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm
    from vkv.caches.saving.request import CodecSpec, Progress
    from vkv.tools.validate import Report


class PromptStore:
    """Keep prompt caches on disk, found by their tokens, shared by any number of processes.

    Nothing is created before the first ``put``; opening a store deletes nothing. Methods take
    an entry's id, its first four or more digits, or its name. Iterating gives all entries.

    Args:
        root: The directory; by default ``store`` in ``$VKV_CACHE_DIR``, else in
            ``$XDG_CACHE_HOME/vkv``, else in ``~/.cache/vkv``. A relative path is made
            absolute here.
        max_bytes: Most bytes that all files together may take (``"20GB"``, or a
            number). ``put`` and ``gc`` evict what was used longest ago.
        max_age: Longest time that an entry may go unused (``"30d"``, or seconds).
        min_free: Bytes that stay free on the disk (``"5GB"``, or a number).
        parents: Create the folders above ``root`` too. Without it, a ``root`` on a disk
            that is not mounted is refused.

    Attributes:
        root: The directory, absolute.
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
        parents: bool = False,
    ):
        self.root = Path(os.path.abspath(default_root() if root is None else root))
        self.limits = Limits().but(max_bytes, max_age, min_free)
        self._layout = Layout(self.root, parents=parents or root is None)
        self._index = Index(self._layout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.root)!r}>"

    _repr_html_ = store_table

    def __len__(self) -> int:
        with self._index.read() as db:
            return entries.count(db)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.ls())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the index; the next call opens it again."""
        self._index.close()

    def put(
        self,
        cache: Sequence[Any],
        tokens: Any,
        *,
        model: Any,
        tokenizer: Any = None,
        codec: CodecSpec = "raw",
        name: str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
        search_paths: Iterable[SearchPath] = (),
        basis: SearchPath | None = None,
        checkpoint_share: float | None = None,
        progress: Progress | None = None,
    ) -> Entry:
        """Store a prompt's cache, whole or not at all.

        A conversation that grew depends on the longest stored one that it begins with:
        only what is new is written. Room is made by evicting others, never pinned ones.
        Putting the same again returns the same entry, and mends a damaged file.

        Args:
            cache: One mlx-lm cache per layer, holding exactly ``tokens``.
            tokens: Their ids, ``(T,)`` or ``(1, T)``.
            model: The model that filled it.
            tokenizer: The tokenizer that made ``tokens``.
            codec: As ``vkv.save`` takes it, like ``basis``, of which a copy is stored, and
                ``checkpoint_share``.
            name: A name for people, stored as metadata ``name``; ``tags`` likewise.
            metadata: Text to text, stored with it.
            search_paths: Where dependencies are that the store lacks; they are stored too.
            progress: Called with (bytes done, bytes in all).

        Raises:
            VkvError: As ``vkv.save``; or it does not fit into ``max_bytes`` beside
                what is pinned; or the folder that would hold the store is missing.
            StoreUnavailableError: No room on the disk, or a busy index; nothing is changed.
            OSError: The store cannot be written.
        """
        from vkv import identity
        from vkv.caches.saving.save import save

        self._layout.check_parents()
        write = partial(
            save, cache=cache, tokens=tokens, model=model, tokenizer=tokenizer, codec=codec,
            metadata=with_names(metadata, name, tags), basis=basis, progress=progress,
            checkpoint_share=checkpoint_share,
        )  # fmt: skip
        parent = ingest.parent_for(self._index, identity.model_id(model), tokens, codec)
        resolver = FileResolver([*search_paths, *([] if basis is None else [basis])])
        return ingest.save_and_ingest(self._index, self.limits, write, parent, resolver)

    def add(
        self,
        path: str | os.PathLike[str],
        *,
        search_paths: Iterable[SearchPath] | None = None,
    ) -> Entry:
        """Store a copy of a ``.vkv`` file, every byte checked, and of its dependencies.

        Args:
            path: The file; it must name its model and hold its tokens.
            search_paths: Files and folders with its dependencies; its own folder if not
                given.

        Raises:
            VkvError: The file is damaged or of no use here; or as ``put``.
            OSError: As ``put``, or the file cannot be read.
        """
        with ingest.room(self._layout, path), self._layout.staging() as folder:
            copy = folder / "new.vkv"
            resolver = FileResolver([Path(path).parent] if search_paths is None else search_paths)
            ingest.copy_checked(Path(path), copy, resolver)
            return ingest.ingest(self._index, self.limits, copy, resolver)

    def find(self, tokens: Any, *, model: Any) -> Found | None:
        """Return the longest stored prefix of a prompt, without loading it; ``None`` if none.

        It covers at most all tokens but the last. Raises as ``get``.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model, or its id (bytes or hex).
        """
        from vkv import identity

        prompt, owner = identity.token_bytes(tokens), identity.model_id(model)
        self._before_search(prompt, owner)
        return retrieve.find(self._index, prompt, owner)

    def get(self, tokens: Any, *, model: Any, live: LiveForm = "dense") -> Hit | None:
        """Load the longest stored prefix of a prompt as a live cache; ``None`` if none.

        A damaged entry is taken out, one that breaks a rule is put aside, each with a line
        in the log of ``vkv.store``, and the next best is tried. No file in the store makes
        this raise, and no other process makes it wait.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model that will go on, or its id (bytes or hex). A model is
                compared with the file as ``vkv.load`` does.
            live: As ``vkv.load`` takes it.

        Raises:
            VkvError: The index cannot be read; or an argument is none of those above.
        """
        from vkv import identity
        from vkv.caches.loading.load import check_live

        check_live(live)
        prompt, owner = identity.token_bytes(tokens), retrieve.owner_of(model)
        self._before_search(prompt, owner.id)
        return retrieve.get(self._index, prompt, owner, live)

    def _before_search(self, prompt: bytes, owner: bytes) -> None:
        """Do nothing; a store with a remote behind it fetches here."""

    def ls(self) -> list[Entry]:
        """Return all entries, the one used last first."""
        with self._index.read() as db:
            return entries.all_entries(db, self._layout)

    def entries(self, *ids: str) -> list[Entry]:
        """Return entries by id. Raises as ``rm``."""
        with self._index.read() as db:
            return [entries.by_number(db, self._layout, entries.resolve(db, k)) for k in ids]

    def stats(self) -> Stats:
        """Count entries and bytes. ``bytes`` is the size of all files together."""
        with self._index.read() as db:
            return entries.stats(db, self.root, self.limits.max_bytes)

    def rm(self, *ids: str, dry_run: bool = False) -> Collected:
        """Remove entries, also pinned ones, all or none; return which.

        The bytes of a file that others depend on stay until those are gone.

        Args:
            ids: Ids of the entries.
            dry_run: Only say what would be removed.

        Raises:
            VkvError: No entry, or more than one, has such an id.
        """
        return collect.remove(self._index, ids, dry_run=dry_run)

    def pin(self, *ids: str) -> list[Entry]:
        """Exempt entries from eviction, and return them. Raises as ``rm``."""
        with self._index.write() as db:
            return entries.set_pinned(db, self._layout, ids, True)

    def unpin(self, *ids: str) -> list[Entry]:
        """Let entries be evicted again, and return them. Raises as ``rm``."""
        with self._index.write() as db:
            return entries.set_pinned(db, self._layout, ids, False)

    def gc(
        self,
        *,
        max_bytes: str | int | None = None,
        max_age: str | float | None = None,
        min_free: str | int | None = None,
        dry_run: bool = False,
    ) -> Collected:
        """Remove what is over the limits, unreadable to this build, or litter; return which.

        Whole files that a crash left out of the index are listed; those that break a rule
        are put aside.

        Args:
            max_bytes: Replaces the store's own limit, like the next two.
            max_age: Longest time unused.
            min_free: Bytes that stay free on the disk.
            dry_run: Only say what would be removed.

        Raises:
            VkvError: A limit is not a size, or not an age.
        """
        limits = self.limits.but(max_bytes, max_age, min_free)
        return collect.collect(self._index, limits, dry_run=dry_run)

    def verify(self, *, deep: bool = False, remove: bool = False) -> Report:
        """Check the index and every byte of every file; return findings, with ids.

        Args:
            deep: Also decode every tensor.
            remove: Take out the entries whose files are damaged, gone, or refused by
                ``vkv.load``, and what depends on them; each with a line in the log of
                ``vkv.store``.

        Raises ``OSError`` if a file cannot be read.
        """
        from vkv.store.local.verify import verify
        from vkv.tools.validate import Report

        return Report(str(self.root), deep, list(verify(self._index, deep=deep, remove=remove)))

    def reindex(self) -> list[Path]:
        """Build a new index from the files; return those that could not be listed.

        Pins and times of use, which no file records, are carried over as far as they can
        be read. Other processes can use the store meanwhile.

        Raises:
            StoreUnavailableError: The old index is busy, or cannot be read now; it stays.
        """
        return rebuild.reindex(self._index)

    def export(self, key: str, path: str | os.PathLike[str]) -> Entry:
        """Write entry ``key`` to a file that depends on no other, in one step; return the entry.

        A file at ``path`` is replaced. Raises as ``rm``.
        """
        (entry,) = self.entries(key)
        ingest.export(self._layout, entry, Path(path))
        return entry
