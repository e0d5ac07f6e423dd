"""Refuse to write over a file that another one needs (L10)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vkv.errors import CacheError, VkvError
from vkv.format.document import open_document
from vkv.format.file_id import FileId


def check_target(path: str | os.PathLike[str], dependencies: Iterable[FileId]) -> None:
    """Refuse to replace a file that the result, or what was read for it, depends on (L10).

    Args:
        path: Where a file shall be written.
        dependencies: Ids of the files depended on.
    """
    ids = set(dependencies)
    if not ids or not os.path.isfile(path):
        return
    try:
        with open_document(path) as document:
            there = document.id
    except VkvError:
        return  # no vkv file
    if there in ids:
        raise CacheError(
            "refusing to replace a file that the result, or a file it was made from, depends on; "
            "write to another name",
            rule="L10",
            at=os.fspath(path),
        )
