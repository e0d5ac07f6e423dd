"""A second decoder, written from ``spec/v1`` alone. It shares no code with vkv.

NumPy, msgpack, blake3 and json only. It trusts the file where vkv checks it: what it
checks are the digests. Decoded floats are float32, whatever dtype the tensor had.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

Parts = dict[str, np.ndarray]
#: Parts, params and shape of a segment to its values.
Decoder = Callable[[Parts, dict[str, Any], tuple[int, ...]], np.ndarray]

DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
    "C64": "<c8",
}  # fmt: skip


@dataclass(frozen=True)
class Decoded:
    """What a file holds: header, token ids, and per layer path its tensors by name."""

    header: dict[str, Any]
    tokens: list[int] | None
    layers: dict[str, dict[str, np.ndarray]]


def read(data: bytes, others: dict[bytes, bytes] | None = None) -> Decoded:
    """Decode a whole ``.vkv`` file; ``others`` are files it may stand on, by id."""
    header, stored = open_file(data, others)
    ids = header.get("tokens")
    tokens = stored[ids["tensor"]].tolist() if ids else None
    layers: dict[str, dict[str, np.ndarray]] = {}
    for i, layer in enumerate(header["layers"]):
        _layer(header, stored, layer, f"layers[{i}]", layers)
    for i, point in enumerate(header.get("checkpoints", [])):
        for path, layer in point["layers"].items():
            _layer(header, stored, layer, f"checkpoints[{i}].{path}", layers)
    return Decoded(header, tokens, layers)


def beside(folder: Path) -> dict[bytes, bytes]:
    """The files of a folder by id."""
    found = {}
    for path in sorted(folder.glob("*.vkv")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        first, stop = json.loads(data[8:start])["vkv.header"]["data_offsets"]
        found[blake3(data[start + first : start + stop]).digest()] = data
    return found


def open_file(
    data: bytes, others: dict[bytes, bytes] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and stored tensors by name; digests are checked."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    metadata = table.pop("__metadata__")
    body = data[8 + length :]

    def cut(name: str) -> bytes:
        start, stop = table[name]["data_offsets"]
        return body[start:stop]

    header = msgpack.unpackb(cut("vkv.header"))
    assert header["version"].split(".")[0] == "1"
    file_id = blake3(cut("vkv.header")).hexdigest()
    assert metadata == {"format": "vkv", "vkv": header["version"], "id": file_id}
    assert data[: 8 + length] == framing(metadata, table)
    stored = {}
    for name, info in header["tensors"].items():
        if "file" in info:
            stored[name] = _referred(info, (others or {})[info["file"]])
            continue
        assert blake3(cut(name)).digest() == info["digest"], name
        stored[name] = _array(cut(name), table[name]["dtype"], table[name]["shape"])
    return header, stored


def framing(metadata: dict[str, str], table: dict[str, Any]) -> bytes:
    """The bytes before the data, as C10 has them, for tensors in the order of the data."""

    def escaped(text: str) -> str:
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r",
                 "\t": "\\t"}  # fmt: skip
        units = text.encode("utf-16-be")
        pairs = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
        return "".join(
            short.get(chr(u)) or (chr(u) if 0x20 <= u <= 0x7F else f"\\u{u:04x}") for u in pairs
        )

    words = ",".join(f'"{key}":"{escaped(value)}"' for key, value in metadata.items())
    rows = ['"__metadata__":{' + words + "}"]
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        sizes, at = (",".join(map(str, entry[key])) for key in ("shape", "data_offsets"))
        rows.append(
            f'"{escaped(name)}":{{"dtype":"{entry["dtype"]}","shape":[{sizes}],'
            f'"data_offsets":[{at}]}}'
        )
    text = "{" + ",".join(rows) + "}"
    text += " " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text.encode()


def _referred(info: dict[str, Any], other: bytes) -> np.ndarray:
    """A tensor of another file: the one of equal digest, dtype and shape."""
    header, stored = open_file(other)
    keys = ("digest", "dtype", "shape")
    (name, *_) = (n for n, i in header["tensors"].items() if all(i[k] == info[k] for k in keys))
    return stored[name]


def _array(raw: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    x = np.frombuffer(raw, DTYPES[dtype]).reshape(shape)
    return (x.astype("<u4") << 16).view("<f4") if dtype == "BF16" else x


def _layer(
    header: dict[str, Any],
    stored: Parts,
    layer: dict[str, Any],
    path: str,
    out: dict[str, dict[str, np.ndarray]],
) -> None:
    out[path] = {
        name: _tensor(header, stored, layer, tensor)
        for name, tensor in layer.get("tensors", {}).items()
    }
    for i, child in enumerate(layer.get("children", [])):
        _layer(header, stored, child, f"{path}.children[{i}]", out)


def _tensor(
    header: dict[str, Any], stored: Parts, layer: dict[str, Any], tensor: dict[str, Any]
) -> np.ndarray:
    shape, pieces, row = tuple(tensor["shape"]), [], 0
    for segment in tensor["segments"]:
        tokens = segment.get("tokens")
        covered = shape if tokens is None else (*shape[:-2], tokens, shape[-1])
        parts = {part: stored[name] for part, name in segment["parts"].items()}
        x = decoder(segment["codec"], segment["version"])(parts, segment.get("params", {}), covered)
        if "rope" in segment:
            where = positions(layer, shape[-2])[row : row + x.shape[-2]]
            x = rotate(x, header["ropes"][segment["rope"]], where)
        pieces.append(x)
        row += tokens or 0
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-2)


def positions(layer: dict[str, Any], rows: int) -> np.ndarray:
    """Position of each row of a layer's keys."""
    scalars = layer["scalars"]
    if layer["kind"] == "chunked":
        return scalars["start"] + np.arange(rows)
    if layer["kind"] != "rotating" or rows == scalars["offset"]:
        return np.arange(rows)
    keep, idx, offset = scalars["keep"], scalars["idx"], scalars["offset"]
    newest = np.arange(offset - (idx - keep), offset)
    older = np.arange(offset - (rows - keep), offset - (idx - keep))
    return np.concatenate([np.arange(keep), newest, older])


def rotate(x: np.ndarray, rope: dict[str, Any], where: np.ndarray) -> np.ndarray:
    """Rotate the first ``dims`` channels of keys to their positions, in float64."""
    dims = rope["dims"]
    if "freqs" in rope:
        step = 1 / np.array(rope["freqs"])
    else:
        step = rope["base"] ** (-2.0 * np.arange(dims // 2) / dims)
    angle = rope.get("scale", 1.0) * where[:, None] * step
    cos, sin = np.cos(angle), np.sin(angle)
    out = x.astype(np.float64)
    pair = slice(0, dims, 2), slice(1, dims, 2)
    if not rope.get("traditional", False):
        pair = slice(0, dims // 2), slice(dims // 2, dims)
    a, b = (rope.get("mscale", 1.0) * out[..., half] for half in pair)
    out[..., pair[0]], out[..., pair[1]] = a * cos - b * sin, a * sin + b * cos
    return out.astype(np.float32)


def raw(parts: Parts, params: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """``spec/v1/codecs/raw.md``."""
    x = parts["data"]
    return x.astype(np.float32) if x.dtype.kind == "f" else x


def affine(parts: Parts, params: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """``spec/v1/codecs/affine.md``."""
    bits, group = params["bits"], params["group"]
    stream = np.unpackbits(parts["codes"].view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*shape, bits) @ (1 << np.arange(bits))
    scales, biases = (
        np.repeat(parts[name].astype(np.float32), group, axis=-1) for name in ("scales", "biases")
    )
    return scales * codes.astype(np.float32) + biases


#: The others are functions ``decode`` in ``tests/reference/<id>.py``, with the same arguments.
DECODERS: dict[tuple[str, int], Decoder] = {("raw", 1): raw, ("affine", 1): affine}


def decoder(codec: str, version: int) -> Decoder:
    """The reference decoder of a codec."""
    if (codec, version) not in DECODERS:
        assert version == 1, (codec, version)
        found = importlib.import_module(f"tests.reference.{codec}")
        DECODERS[codec, version] = found.decode
    return DECODERS[codec, version]
