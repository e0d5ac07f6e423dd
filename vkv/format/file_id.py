"""Define the id of a file: the digest of its header, as text."""

from __future__ import annotations

import re
from typing import NewType, TypeGuard

from blake3 import blake3

#: 64 hex digits in small letters: BLAKE3 of the bytes of ``vkv.header``.
FileId = NewType("FileId", str)
_PATTERN = re.compile(r"[0-9a-f]{64}")


def of_header(raw: bytes) -> FileId:
    """Return the id of the file whose ``vkv.header`` has these bytes."""
    return FileId(blake3(raw).hexdigest())


def from_bytes(digest: bytes) -> FileId:
    """Return the id that a header holds as 32 bytes (``file`` of a stored tensor)."""
    return FileId(digest.hex())


def is_file_id(value: object) -> TypeGuard[FileId]:
    """Tell whether ``value`` is the text of an id."""
    return isinstance(value, str) and _PATTERN.fullmatch(value) is not None
