"""Attach a basis file to one save: its tables become external references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
from msgspec import structs

from vkv import identity
from vkv.arrays.cache_file import CacheFile, open_file
from vkv.codecs.registry import CodecRequest
from vkv.errors import MismatchError, VkvError
from vkv.format.dependencies import SearchPath
from vkv.format.schema import Model, Rope, Stored


@dataclass(frozen=True, slots=True)
class AttachedBasis:
    """An open basis file."""

    file: CacheFile

    def table(self, path: str) -> mx.array | None:
        """Return the table for tensor ``path``, ``layers.3.keys``, if there is one."""
        name = self.file.header.tables.get(f"{path}.basis")
        return None if name is None else self.file.array(name)

    def tables(self) -> tuple[Stored, ...]:
        """Return all tables it offers, each with the id of the file that holds it."""
        own = bytes.fromhex(self.file.document.id)
        stored = [self.file.header.tensors[name] for name in self.file.header.tables.values()]
        return tuple(t if t.file else structs.replace(t, file=own) for t in stored)


@contextmanager
def attached(
    basis: SearchPath | None,
    asked: Sequence[CodecRequest],
    model: Model | None,
    ropes: Sequence[Rope],
) -> Iterator[AttachedBasis | None]:
    """Open the file ``basis``, if there is one, until the block exits.

    Args:
        basis: A file that ``vkv.train_basis`` made.
        asked: The codecs that were asked for.
        model: The model of the caches, if it is known.
        ropes: Of that model.

    Raises:
        MismatchError: It was made for another model (I1).
        VkvError: It is no basis, the caches have no known model, or no codec takes one.
        OSError: It cannot be opened.
    """
    if basis is None:
        yield None
        return
    with open_file(basis) as file:
        try:
            _check(file, asked, model, ropes)
        except VkvError as exc:
            raise exc.of_file(str(basis)) from None
        yield AttachedBasis(file)


def _check(
    file: CacheFile, asked: Sequence[CodecRequest], model: Model | None, ropes: Sequence[Rope]
) -> None:
    if not file.header.tables:
        raise VkvError("holds no tables, expected a basis file")
    if not any(choice.codec.traits.takes_basis for choice in asked):
        texts = " and ".join(dict.fromkeys(choice.text for choice in asked))
        raise VkvError(f"{texts} takes no basis, expected tc")
    if model is None:
        raise VkvError("is made for one model, and nothing says which one filled the cache")
    theirs = file.header
    if theirs.model is None:
        raise MismatchError(["the file does not say for which model it was made"])
    wrong = identity.differences(theirs.model, theirs.ropes, model, tuple(ropes))
    if wrong:
        raise MismatchError(wrong)
