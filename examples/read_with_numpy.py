"""Read a .vkv file without vkv and without MLX: the page to port to another language.

    python examples/read_with_numpy.py sys.vkv

It reads tensors that were stored raw, and says which codec the others need. The rules are
in spec/v1/format.md; a whole second reader is in tests/reference.
"""

import json
import sys
from pathlib import Path

import msgpack
import numpy as np
from blake3 import blake3

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "U8": "u1"}


def read(path):
    """Return the header, and every stored tensor by name. Digests are checked."""
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    identity = table.pop("__metadata__")
    start = 8 + length

    def stored(name):
        first, end = table[name]["data_offsets"]
        return data[start + first : start + end]

    assert blake3(stored("vkv.header")).hexdigest() == identity["id"], "header damaged (C8)"
    header = msgpack.unpackb(stored("vkv.header"))
    tensors = {}
    for name, about in header["tensors"].items():
        if "file" in about:  # it stands in another file (H11)
            continue
        assert blake3(stored(name)).digest() == about["digest"], f"{name} damaged (D1)"
        values = np.frombuffer(stored(name), DTYPES[about["dtype"]]).reshape(about["shape"])
        if about["dtype"] == "BF16":  # the upper half of a float32
            values = (values.astype("<u4") << 16).view("<f4")
        tensors[name] = values
    return header, tensors


def rows(layer, name, tensors):
    """Return keys or values of a layer, (B, H, T, D), if all of it was stored raw."""
    segments = layer["tensors"][name]["segments"]
    if any(segment["codec"] != "raw" for segment in segments):
        return None
    return np.concatenate([tensors[segment["parts"]["data"]] for segment in segments], axis=-2)


if __name__ == "__main__":
    header, tensors = read(sys.argv[1])
    if "vkv.tokens" in tensors:
        print("tokens", tensors["vkv.tokens"][:8], "…")
    for number, layer in enumerate(header["layers"]):
        for name, about in layer.get("tensors", {}).items():
            values = rows(layer, name, tensors)
            codecs = sorted({segment["codec"] for segment in about["segments"]})
            found = f"mean {values.mean():.4f}" if values is not None else f"needs {codecs}"
            print(f"layer {number} {name} {about['shape']}: {found}")
