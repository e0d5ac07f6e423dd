"""Build the JSON that begins a file: its metadata and its table of tensors (C8, C10).

One text follows from one content, so writers make it here and readers compare with it: no
byte of it is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from typing import Any

from vkv.errors import ContainerError
from vkv.format.dtypes import ITEMSIZE
from vkv.format.file_id import FileId
from vkv.format.limits import ALIGN, MAX_JSON

#: Name of the tensor that holds the header, the first in the file.
HEADER = "vkv.header"
FORMAT = "vkv"
#: Name, dtype and shape of a tensor.
Form = tuple[str, str, tuple[int, ...]]


def metadata(version: str, file_id: FileId) -> dict[str, str]:
    """Return the ``__metadata__`` of a file (C8)."""
    return {"format": FORMAT, "vkv": version, "id": file_id}


def frame(version: str, file_id: FileId, forms: Iterable[Form]) -> bytes:
    """Return the bytes before the data of a container: the length of the JSON, and the JSON.

    Args:
        version: Version of the format, as in the header.
        file_id: Id of the file. The result has the same length for every id.
        forms: Of all tensors, ``vkv.header`` among them, in the order of the data.

    Raises:
        ContainerError: The JSON is too long (C2).
    """
    table: dict[str, Any] = {"__metadata__": metadata(version, file_id)}
    at = 0
    for name, dtype, shape in forms:
        stop = at + prod(shape) * ITEMSIZE[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_JSON:
        raise ContainerError(
            f"JSON header of {len(text)} bytes, the limit is {MAX_JSON}", rule="C2"
        )
    return len(text).to_bytes(8, "little") + text
