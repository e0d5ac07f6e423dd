"""A basis file in the service of a save: its tables are used, and referred to by its id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vkv import identity
from vkv.arrays.cache_file import CacheFile, open_file
from vkv.caches.saving.write_plan import Plan
from vkv.errors import MismatchError, VkvError
from vkv.format.dependencies import SearchPath
from vkv.format.schema import Header


@contextmanager
def lent(plan: Plan, head: Header, basis: SearchPath | None) -> Iterator[None]:
    """Within it, ``plan`` encodes with the tables of the file ``basis``, if there is one.

    Args:
        plan: Says which codecs were asked for, and the ropes of the model.
        head: Names the model of the caches.
        basis: A file that ``vkv.train_basis`` made.

    Raises:
        MismatchError: It was made for another model (I1).
        VkvError: It is no basis, the caches have no known model, or no codec takes one.
        OSError: It cannot be opened.
    """
    if basis is None:
        yield
        return
    with open_file(basis) as file:
        try:
            _check(file, plan, head)
        except VkvError as exc:
            raise exc.within(str(basis)) from None
        plan.lend(file)
        yield


def _check(file: CacheFile, plan: Plan, head: Header) -> None:
    if not file.header.tables:
        raise VkvError("holds no tables, expected a basis file")
    asked = (plan.wish.keys, plan.wish.values)
    if not any(choice.codec.traits.takes_basis for choice in asked):
        texts = " and ".join(dict.fromkeys(choice.text for choice in asked))
        raise VkvError(f"{texts} takes no basis, expected tc")
    if head.model is None:
        raise VkvError("is made for one model, and nothing says which one filled the cache")
    theirs = file.header
    if theirs.model is None:
        raise MismatchError(["the file does not say for which model it was made"])
    wrong = identity.differences(theirs.model, theirs.ropes, head.model, tuple(plan.ropes))
    if wrong:
        raise MismatchError(wrong)
