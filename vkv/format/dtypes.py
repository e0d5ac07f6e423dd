"""Name the dtypes of stored tensors, as safetensors does."""

from __future__ import annotations

#: Bytes of one value.
ITEMSIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
#: Dtypes of keys and values: what attention computes with and lossy codecs decode to.
FLOATS = ("F16", "BF16", "F32")
#: The largest F16.
F16_MAX = 65504.0
