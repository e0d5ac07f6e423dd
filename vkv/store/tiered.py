"""Put a remote behind a local store."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from vkv.errors import VkvError
from vkv.format.dependencies import FileResolver
from vkv.format.document import Document
from vkv.format.layers import external_references
from vkv.store.local import retrieve
from vkv.store.local.ingest import dependency_paths, ingest
from vkv.store.local.layout import Layout
from vkv.store.remote import transfer
from vkv.store.remote.patience import Patience
from vkv.store.remote.remote import Remote
from vkv.store.remote.transfer import Progress
from vkv.store.results import Entry
from vkv.store.store import PromptStore

_log = logging.getLogger("vkv.store")
#: Seconds that an answer waits for the remote.
DEADLINE = 5.0
#: ... and that ``put`` waits until its entry is pushed.
PUSH_DEADLINE = 600.0
#: Entries of the remote that one search fetches in vain before it gives up.
MAX_REFUSED = 4


class TieredStore(PromptStore):
    """A local store that fetches longer prefixes from a remote.

    ``find`` and ``get`` ask the remote for a longer prefix than the local one, and
    ingest what they fetch, checked by id. A remote that fails, or does not answer in
    time, costs a line in the log of ``vkv.store``; the local answer stands, and the remote
    is not asked for a while, longer after each failure. A fetch that takes longer goes on
    in the background.

    Args:
        root: As of ``PromptStore``.
        remote: The remote, or its URL.
        write_through: ``put`` also pushes.
        deadline: Seconds that ``find`` and ``get`` wait for the remote.
        limits: ``max_bytes``, ``max_age``, ``min_free`` and ``parents`` of
            ``PromptStore``. An entry larger than ``max_bytes`` is not fetched.

    Raises:
        VkvError: ``remote`` or a limit is refused; so is http, which cannot be searched.
        OSError: The remote can be neither listed nor reached.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        remote: str | Remote,
        write_through: bool = False,
        deadline: float = DEADLINE,
        **limits: Any,
    ):
        super().__init__(root, **limits)
        self.remote = remote if isinstance(remote, Remote) else Remote(remote)
        self.remote.objects.check_listable()
        self.write_through = write_through
        self._patience = Patience(deadline)
        self._refused: set[str] = set()

    def __repr__(self) -> str:
        return f"<TieredStore {str(self.root)!r}, remote {self.remote!r}>"

    def put(self, *args: Any, **options: Any) -> Entry:
        """Store a cache as ``PromptStore.put`` does; with ``write_through``, push it too."""
        entry = super().put(*args, **options)
        if self.write_through:
            self._patience.attempt(lambda: self.push(entry.id), deadline=PUSH_DEADLINE)
        return entry

    def push(self, key: str, *, progress: Progress | None = None) -> str:
        """Send an entry to the remote and return its id. Raises as ``Remote.push``."""
        return push(self, self.remote, key, progress)

    def pull(self, key: str, *, progress: Progress | None = None) -> Entry:
        """Ingest an entry of the remote, with its dependencies.

        Returns:
            The entry; one of another id if the same is here already.

        Raises:
            VkvError: As ``Remote.pull`` and ``PromptStore.add``.
            OSError: Likewise.
        """
        return pull(self, self.remote, key, progress)[0]

    def _before_search(self, prompt: bytes, owner: bytes) -> None:
        """Fetch a longer prefix than the local one, within the deadline."""
        here = retrieve.find(self._index, prompt, owner)
        covered = here.tokens if here else 0
        tokens = memoryview(prompt).cast("I").tolist()
        self._patience.attempt(lambda: self._fetch(tokens, owner, covered))

    def _fetch(self, tokens: Any, owner: bytes, covered: int) -> None:
        """Fetch the longest prefix that the remote has; a bad one is refused for good."""
        for _ in range(MAX_REFUSED):
            match = self.remote.find(
                tokens, model=owner, longer_than=covered, refused=self._refused
            )
            limit = self.limits.max_bytes
            if match is None or (limit is not None and match.size > limit):
                return
            try:
                self.pull(match.id)
            except VkvError as exc:
                self._refused.add(match.id)
                _log.warning("remote: %s is not used: %s", match.id, exc)
            else:
                return


def push(store: PromptStore, remote: Remote, key: str, progress: Progress | None) -> str:
    """Send an entry of any store to any remote and return its id."""
    (entry,) = store.entries(key)
    paths = dependency_paths(store._layout, entry)
    return remote.push(entry.path, search_paths=paths, progress=progress)


def pull(
    store: PromptStore, remote: Remote, key: str, progress: Progress | None
) -> tuple[Entry, list[str]]:
    """Ingest an entry of any remote, also one without listings, into any store.

    Returns:
        The entry, and the ids of the dependencies that were fetched too.
    """
    fetched: list[str] = []
    key, layout = remote.full_id(key), store._layout
    with layout.staging() as folder, remote.open(key) as document:
        written, others = folder / "new.vkv", folder / "others"
        others.mkdir()
        _download(layout, document, key, written, progress)
        for needed in external_references(document.header):
            if not layout.path(needed).exists():
                with remote.open(needed) as dependency:
                    _download(layout, dependency, needed, others / f"{needed}.vkv", None)
                fetched.append(needed)
        return ingest(store._index, store.limits, written, FileResolver([others])), fetched


def _download(
    layout: Layout, document: Document, key: str, path: Path, progress: Progress | None
) -> None:
    """Fetch to a staging folder; an interrupted download beside those folders is continued."""
    transfer.download(document, key, path, layout.incoming / f"{key}.part", progress)
