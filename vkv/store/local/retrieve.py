"""Find the entry that covers most of a prompt, and load its live cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vkv.errors import (
    CacheError,
    CodecError,
    HeaderError,
    MismatchError,
    UnsupportedError,
    VkvError,
)
from vkv.format.dependencies import FileResolver
from vkv.format.document import open_document
from vkv.store.local import entries, lookup
from vkv.store.local.file_check import damage
from vkv.store.local.index import Index
from vkv.store.local.ingest import dependency_paths
from vkv.store.local.prefix_tree import DamagedEntryError
from vkv.store.local.repair import discard, put_aside, repair
from vkv.store.results import Entry, Found, Hit

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm
    from vkv.caches.loading.owner import ModelIdentity

_log = logging.getLogger("vkv.store")

#: Entries that one search tries to load or correct before it gives up.
MAX_TRIES = 16
#: Seconds that an answer waits for the lock to take out, or correct, what is wrong.
PATIENCE = 0.25
#: Rules that a sound file can break because of the installed mlx-lm, or of this prompt.
RULES_OF_CIRCUMSTANCES = frozenset({"L1", "L2", "L8"})


@dataclass(slots=True)
class Search:
    """Find entries for one prompt, each at most once.

    Attributes:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
        excluded: Numbers of entries that could not be used.
        corrected: Numbers of entries that were entered anew once.
    """

    index: Index
    tokens: bytes
    owner: bytes
    excluded: set[int] = field(default_factory=set)
    corrected: set[int] = field(default_factory=set)

    def next(self) -> tuple[int, Found] | None:
        """Return number and entry of the longest prefix among those not excluded.

        The last token is never covered: it gives the logits.
        """
        while len(self.excluded) < MAX_TRIES:
            try:
                return self._best()
            except DamagedEntryError as exc:
                self._correct(exc.row["n"], exc.row["id"], exc)
            except OSError as exc:  # not allowed, or too many open files: no reason to drop it
                _log.warning("a prompt cannot be searched for: %s", exc)
                return None
        return None

    def _best(self) -> tuple[int, Found] | None:
        with self.index.read() as db:
            prompt = lookup.but_last(self.tokens)
            excluded = frozenset(self.excluded)
            match = lookup.longest(db, self.index.layout, self.owner, prompt, excluded)
            if match is None:
                return None
            row, count = match
            return row["n"], Found(entries.by_number(db, self.index.layout, row["n"]), count)

    def _correct(self, number: int, key: str, reason: Exception) -> None:
        """Enter an entry anew, once; leave it out if that does not help."""
        again = number in self.corrected
        self.corrected.add(number)
        if again or not repair(self.index, key, reason, patience=PATIENCE):
            self.excluded.add(number)

    def another_file(self, number: int, entry: Entry) -> None:
        """Deal with an entry whose file is not the one that the index names."""
        self._correct(number, entry.id, VkvError("the file is another one"))


def find(index: Index, tokens: bytes, owner: bytes) -> Found | None:
    """Return the entry that covers most of ``tokens``, but not the last of them.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: Id of the model.
    """
    match = Search(index, tokens, owner).next()
    return None if match is None else match[1]


@dataclass(frozen=True, slots=True)
class Owner:
    """Hold the identity of the model that a prompt is searched for.

    Attributes:
        id: Of the model.
        model: The live model, to be compared with the file; ``None`` if only its id is known.
        identity: Of the live model, computed once.
    """

    id: bytes
    model: Any = None
    identity: ModelIdentity | None = None


def owner_of(model: Any) -> Owner:
    """Return the identity of a live model, or the id of one. Raises as ``identity.model_id``."""
    from vkv import identity

    if isinstance(model, bytes | str):
        return Owner(identity.model_id(model))
    known = identity.of_model(model)
    return Owner(known[0].id, model, known)


def get(index: Index, tokens: bytes, owner: Owner, live: LiveForm) -> Hit | None:
    """Load the longest stored prefix; where an entry cannot serve, the next best is tried.

    Args:
        index: Of the store.
        tokens: Little-endian u32, the whole prompt.
        owner: The model that will go on.
        live: As ``vkv.load`` takes it.
    """
    search, ids = Search(index, tokens, owner.id), memoryview(tokens).cast("I").tolist()
    while (match := search.next()) is not None:
        number, found = match
        try:
            hit = _load(index, found, ids, owner, live)
        except (VkvError, OSError) as exc:
            search.excluded.add(number)
            _deal_with(index, found.entry, exc)
        else:
            if hit is not None:
                index.note_use(found.entry.id)
                return hit
            search.another_file(number, found.entry)
    return None


def _load(
    index: Index, found: Found, tokens: list[int], owner: Owner, live: LiveForm
) -> Hit | None:
    """Load an entry; ``None`` if its file is not the one that the index names.

    The file is opened once, and its header parsed once.
    """
    from vkv.arrays.cache_file import CacheFile
    from vkv.caches.loading.load import load_file

    entry = found.entry
    with open_document(entry.path) as document:
        model = document.header.model
        if document.id != entry.id or model is None or model.id != owner.id:
            return None
        resolver = FileResolver(dependency_paths(index.layout, entry))
        with CacheFile(document, resolver=resolver) as file:
            prompt = load_file(file, model=owner.model, live=live, known=owner.identity)
    rest = prompt.resume(tokens)
    return Hit(entry, prompt.cache, len(tokens) - len(rest), rest)


def _deal_with(index: Index, entry: Entry, reason: VkvError | OSError) -> None:
    """Take out damaged files; put aside an entry that is sound but breaks a rule.

    All bytes are compared first: too little memory, or too many open files, must not
    cost an entry. One that does not fit this model, or needs a newer build, stays.
    """
    if isinstance(reason, MismatchError | UnsupportedError):
        _log.warning("%s cannot be used: %s", entry.id, reason)
        return
    files = {k: damage(index.layout.path(k)) for k in (entry.id, *entry.dependencies)}
    broken = {key: file for key, file in files.items() if file.problem is not None}
    for key, file in broken.items():
        discard(index, file, key, patience=PATIENCE)
    if not broken and _is_rule(reason):
        put_aside(index, files[entry.id], entry.id, reason, patience=PATIENCE)
    elif not broken:
        _log.warning("%s cannot be read: %s", entry.id, reason)


def _is_rule(reason: VkvError | OSError) -> bool:
    """Return whether an error is about the content of a file, and the same at every load."""
    if isinstance(reason, CacheError | HeaderError | CodecError):
        return reason.rule not in RULES_OF_CIRCUMSTANCES
    return False
