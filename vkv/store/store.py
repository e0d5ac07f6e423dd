"""``vkv.PromptStore``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection, Row
from typing import TYPE_CHECKING, Any

from vkv.errors import CacheError, MismatchError, UnsupportedError, VkvError
from vkv.store import lookup, rows, units
from vkv.store.describe import Description, describe
from vkv.store.entry import Entry, Found, Hit
from vkv.store.index import Index
from vkv.store.layout import Layout
from vkv.store.tree import DamagedError

if TYPE_CHECKING:
    from vkv.live.save import CodecSpec, Progress

_log = logging.getLogger("vkv.store")


def default_root() -> Path:
    """``store`` in ``$VKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/vkv``, else ``~/.cache/vkv``."""
    from vkv.demo_model import cache_dir

    return cache_dir() / "store"


class PromptStore:
    """Prompt caches on disk, found by their tokens; shared by any number of processes.

    Nothing is created before the first ``put``, and opening a store deletes nothing.

    Args:
        root: The directory; by default ``store`` in ``$VKV_CACHE_DIR``, else in
            ``$XDG_CACHE_HOME/vkv``, else in ``~/.cache/vkv``.
        max_bytes: ``put`` keeps the files of all models together below so many bytes
            (``"20GB"``, or a number) by evicting those that were used longest ago.

    Raises:
        VkvError: ``max_bytes`` is not a size.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, max_bytes: str | int | None = None
    ):
        self.root = Path(root) if root is not None else default_root()
        self.max_bytes = None if max_bytes is None else units.size(max_bytes)
        self._layout = Layout(self.root)
        self._index = Index(self._layout, self._fill)

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
        progress: Progress | None = None,
    ) -> Entry:
        """Store a prompt's cache.

        Args:
            cache: One mlx-lm cache per layer, holding exactly ``tokens``.
            tokens: Their ids, ``(T,)`` or ``(1, T)``.
            model: The model that filled it.
            tokenizer: The tokenizer that made ``tokens``.
            codec: As ``vkv.save`` takes it.
            metadata: Text to text, stored with it.
            progress: Called with (bytes done, bytes in all).

        Returns:
            The entry. Putting the same again gives the same entry.

        Raises:
            VkvError: As ``vkv.save``.
            OSError: The store cannot be written.
        """
        from vkv.live.save import save

        with self._layout.desk() as desk:
            info = save(
                desk / "new.vkv", cache, tokens=tokens, model=model, tokenizer=tokenizer,
                codec=codec, metadata=metadata, progress=progress,
            )  # fmt: skip
            return self._take_in(Path(info.path))

    def _take_in(self, written: Path) -> Entry:
        what = describe(written)
        with self._index.write() as db:
            self._layout.accept(written, what.key)
            number = rows.add(db, self._layout, what, time.time(), self._drop)
            return rows.by_number(db, self._layout, number)

    def find(self, tokens: Any, *, model: Any) -> Found | None:
        """The longest stored prefix of a prompt, without loading it.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model, or its id (bytes or hex).

        Returns:
            The entry and how many tokens it covers, at most all but the last;
            ``None`` if nothing stored begins like ``tokens``.
        """
        from vkv.identity import token_bytes

        data, owner = lookup.but_last(token_bytes(tokens)), model_id(model)
        while True:
            try:
                with self._index.read() as db:
                    match = lookup.longest(db, self._layout, owner, data)
                    if match is None:
                        return None
                    row, count = match
                    return Found(rows.by_number(db, self._layout, row["n"]), count)
            except DamagedError as exc:
                self._discard(exc.row["id"], exc)

    def get(self, tokens: Any, *, model: Any, live: str = "dense") -> Hit | None:
        """The longest stored prefix of a prompt, as a live cache.

        A damaged entry is taken out, with a line in the log, and the next best one
        is tried: nothing that lies in the store raises.

        Args:
            tokens: The whole prompt, ``(T,)`` or ``(1, T)``.
            model: The model that will go on, or its id (bytes or hex); a model is
                also compared with the file as ``vkv.load`` does.
            live: As ``vkv.load`` takes it.

        Returns:
            The cache and the tokens still to be computed, at least one; ``None`` if
            nothing stored begins like ``tokens``.
        """
        from vkv.identity import token_bytes

        data = token_bytes(tokens)
        ids = memoryview(data).cast("I").tolist()
        owner = model_id(model)
        while (found := self.find(tokens, model=owner)) is not None:
            try:
                hit = _load(found, ids, None if isinstance(model, bytes | str) else model, live)
            except (MismatchError, UnsupportedError, CacheError) as exc:
                _log.warning("%s cannot be used: %s", found.entry.id, exc)
                return None
            except (VkvError, FileNotFoundError) as exc:
                self._discard(found.entry.id, exc)
                continue
            self._touch(hit.entry)
            return hit
        return None

    def _touch(self, entry: Entry) -> None:
        try:
            with self._index.write() as db:
                rows.touch(db, entry.id)
        except (VkvError, OSError) as exc:  # a store that only can be read
            _log.debug("use of %s not noted: %s", entry.id, exc)

    def _discard(self, key: str, reason: Exception) -> None:
        """Take out an entry that turned out to be damaged."""
        with self._index.write() as db:
            row = db.execute("SELECT * FROM entries WHERE id = ?", (key,)).fetchone()
            if row is not None:
                rows.take_out(db, [row["n"]])
                self._drop(row, reason)
        self._sweep()

    def _drop(self, row: Row, reason: Exception) -> None:
        _log.warning("%s is damaged and was taken out: %s", row["id"], reason)

    def _sweep(self) -> int:
        with self._index.write() as db:
            return rows.sweep(db, self._layout)

    def ls(self) -> list[Entry]:
        """All entries, the one used last first."""
        with self._index.read() as db:
            return rows.entries(db, self._layout)

    def _fill(self, db: Connection) -> None:
        """Enter the files that are there."""
        for path in self._layout.files():
            try:
                what: Description = describe(path)
                rows.add(db, self._layout, what, path.stat().st_mtime, self._drop)
            except (VkvError, OSError) as exc:
                _log.warning("%s is not entered: %s", path.name, exc)


def model_id(model: Any) -> bytes:
    """The id of a model, given as such (bytes, hex) or live."""
    if isinstance(model, bytes):
        return model
    if isinstance(model, str):
        return bytes.fromhex(model)
    from vkv.identity import of_model

    return of_model(model)[0].id


def _load(found: Found, tokens: list[int], model: Any, live: str) -> Hit:
    from vkv.live.load import load

    prompt = load(found.entry.path, model=model, live=live)
    rest = prompt.resume(tokens)
    return Hit(found.entry, prompt.cache, len(tokens) - len(rest), rest)
