"""Refuse stored tensors that MLX cannot hold."""

from __future__ import annotations

from vkv.codecs.protocol import DTYPES
from vkv.errors import HeaderError
from vkv.format.document import Document
from vkv.format.dtypes import ITEMSIZE

#: MLX counts the bytes of a row in 32 bits, with a sign.
MAX_ROW = (1 << 31) - 1


def check_readable(document: Document, name: str) -> None:
    """Check that MLX has the dtype of a stored tensor, and can count its rows (H2)."""
    entry = document.entries[name]
    if entry.dtype not in DTYPES:
        raise HeaderError(f"MLX has no dtype {entry.dtype}", rule="H2", at=name)
    row = entry.shape[-1] * ITEMSIZE[entry.dtype] if entry.shape else 0
    if row > MAX_ROW:
        raise HeaderError(
            f"a row of {row} bytes, expected at most {MAX_ROW}, the most that MLX counts",
            rule="H2",
            at=name,
        )
