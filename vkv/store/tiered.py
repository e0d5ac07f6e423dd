"""A store with a remote behind it."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkv.errors import VkvError
from vkv.format.dependencies import FileResolver
from vkv.format.document import Document, open_document
from vkv.format.layers import external_references
from vkv.store.local import entries as rows
from vkv.store.local.ingest import take_in
from vkv.store.local.layout import Layout
from vkv.store.remote import transfer
from vkv.store.remote.remote import Remote
from vkv.store.remote.transfer import Progress
from vkv.store.results import Entry, Found, Hit
from vkv.store.store import PromptStore

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm

_log = logging.getLogger("vkv.store")
#: Seconds in which a remote that failed is not asked again, so that answers do not wait for it.
PAUSE = 30.0


class TieredStore(PromptStore):
    """A local store that fetches what a remote has more of.

    ``find`` and ``get`` ask the remote for a longer prefix than the local one, and take
    in what they fetch, checked by id. A remote that cannot be reached costs a line in
    the log of ``vkv.store`` and is left alone for a while; the local answer stands.

    Args:
        root: As of ``PromptStore``.
        remote: The remote, or its URL.
        write_through: ``put`` also pushes.
        limits: ``max_bytes``, ``max_age`` and ``min_free`` of ``PromptStore``. What is
            larger than ``max_bytes`` is not fetched.

    Raises:
        VkvError: ``remote`` or a limit is refused; so is http, where nothing can be found.
        OSError: The remote can be neither listed nor reached.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        remote: str | Remote,
        write_through: bool = False,
        **limits: Any,
    ):
        super().__init__(root, **limits)
        self.remote = remote if isinstance(remote, Remote) else Remote(remote)
        self.remote.listable()
        self.write_through = write_through
        self._silent_until = 0.0

    def put(self, *args: Any, **options: Any) -> Entry:
        """As ``PromptStore.put``; then pushed, with ``write_through``."""
        entry = super().put(*args, **options)
        if self.write_through and self._answers():
            try:
                self.push(entry.id)
            except (VkvError, OSError) as exc:
                self._silence(exc)
        return entry

    def find(self, tokens: Any, *, model: Any) -> Found | None:
        """As ``PromptStore.find``, after what the remote has more of is fetched."""
        self._read_through(tokens, model)
        return super().find(tokens, model=model)

    def get(self, tokens: Any, *, model: Any, live: LiveForm = "dense") -> Hit | None:
        """As ``PromptStore.get``, after what the remote has more of is fetched."""
        self._read_through(tokens, model)
        return super().get(tokens, model=model, live=live)

    def push(self, key: str, *, progress: Progress | None = None) -> str:
        """Send an entry to the remote; its id. Raises as ``Remote.push``."""
        return push(self, self.remote, key, progress)

    def pull(self, key: str, *, progress: Progress | None = None) -> Entry:
        """Take an entry in from the remote, with the files it stands on.

        Returns:
            The entry; one of another id if the same is here already.

        Raises:
            VkvError: As ``Remote.pull`` and ``PromptStore.add``.
            OSError: Likewise.
        """
        return pull(self, self.remote, key, progress)[0]

    def _read_through(self, tokens: Any, model: Any) -> None:
        if not self._answers():
            return
        here = super().find(tokens, model=model)
        try:
            match = self.remote.find(tokens, model=model, longer_than=here.tokens if here else 0)
            limit = self.limits.max_bytes
            if match is not None and (limit is None or match.size <= limit):
                self.pull(match.id)
        except (VkvError, OSError) as exc:
            self._silence(exc)

    def _answers(self) -> bool:
        return time.monotonic() >= self._silent_until

    def _silence(self, exc: Exception) -> None:
        _log.warning("remote: %s; not asked for %d s", exc, PAUSE)
        self._silent_until = time.monotonic() + PAUSE


def push(store: PromptStore, remote: Remote, key: str, progress: Progress | None) -> str:
    """As ``TieredStore.push``, from any store to any remote."""
    with store._index.read() as db:
        entry = rows.by_number(db, store._layout, rows.resolve(db, key))
    with open_document(entry.path) as document:
        bases = [store._layout.path(base) for base in external_references(document.header)]
    return remote.push(entry.path, search_paths=bases, progress=progress)


def pull(
    store: PromptStore, remote: Remote, key: str, progress: Progress | None
) -> tuple[Entry, list[str]]:
    """As ``TieredStore.pull``, to any store from any remote, also one without listings.

    Returns:
        The entry, and the ids of the files it stands on that were fetched too.
    """
    fetched: list[str] = []
    key, layout = remote.full_id(key), store._layout
    with layout.desk() as desk, remote.open(key) as document:
        own, others = desk / "new.vkv", desk / "others"
        others.mkdir()
        _download(layout, document, key, own, progress)
        for base in external_references(document.header):
            if not layout.path(base).exists():
                with remote.open(base) as other:
                    _download(layout, other, base, others / f"{base}.vkv", None)
                fetched.append(base)
        return take_in(store._index, store.limits, own, FileResolver([others])), fetched


def _download(
    layout: Layout, document: Document, key: str, path: Path, progress: Progress | None
) -> None:
    """Fetch to a desk; what an interrupted one left beside the desks is gone on from."""
    transfer.download(document, key, path, layout.incoming / f"{key}.part", progress)
