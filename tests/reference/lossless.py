"""Decode `lossless`, from ``spec/v1/codecs/lossless.md`` alone, in NumPy.

Zstandard frames are read by the standard library's module, or its backport: RFC 8878 is
normative, and has other implementations.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Low bits of the upper half, and planes of bytes behind them.
FORMS = {"BF16": (4, 0), "F16": (8, 0), "F32": (4, 2)}


def decode(
    parts: dict[str, np.ndarray], params: dict[str, Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Return the values of a segment as float32."""
    words = bits(bytes(parts["codes"]), params["dtype"], shape)
    if params["dtype"] == "F16":
        return words.astype("<u2").view("<f2").astype(np.float32)
    return (words << (16 if params["dtype"] == "BF16" else 0)).astype("<u4").view("<f4")


def bits(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of a segment as unsigned integers."""
    tokens = shape[-2] if len(shape) > 1 else 1
    rest = [n for axis, n in enumerate(shape) if axis != len(shape) - 2]
    channels = int(np.prod(rest))
    found = []
    while data:
        (size,) = struct.unpack_from("<I", data)
        found.append(record(data[4 : 4 + size], dtype, channels))
        data = data[4 + size :]
    words = np.concatenate(found).reshape(tokens, *rest)
    return np.moveaxis(words, 0, -2).reshape(shape)


def record(data: bytes, dtype: str, channels: int) -> np.ndarray:
    """Return the values of one record, (tokens, channels)."""
    low_bits, more = FORMS[dtype]
    tokens, kind, base = struct.unpack_from("<IBH", data)
    at = 7

    def frame() -> np.ndarray:
        nonlocal at
        (size,) = struct.unpack_from("<I", data, at)
        at += 4 + size
        return np.frombuffer(zstd.decompress(data[at - size : at]), np.uint8).astype(int)

    if kind == 1:
        return stored(frame(), 4 if more else 2).reshape(tokens, channels)
    delta, group = frame().reshape(2, channels)
    group, flip = group & 127, group >> 7
    symbol = np.zeros((tokens, channels), int)
    for g in range(group.max() + 1):
        mine = np.flatnonzero(group == g)
        symbol[:, mine] = frame().reshape(tokens, len(mine))
    place = 1 << (15 - low_bits)
    head = (symbol % 128 + place * (symbol >> 7) + base + delta + place * flip) % (2 * place)
    low = frame().reshape(tokens, -1)
    if low_bits == 4:
        low = np.concatenate([low & 15, low >> 4], axis=1)[:, :channels]
    planes = [frame().reshape(tokens, channels) for _ in range(more)]
    if dtype != "F16":
        escapes = frame()
        head[symbol == 0] = (escapes[::2] + 256 * escapes[1::2]) % 4096
    assert not any(data[at:])
    words = head << low_bits | low
    for plane in planes:
        words = words << 8 | plane
    return words


def stored(content: np.ndarray, size: int) -> np.ndarray:
    """Return little-endian integers of so many bytes."""
    return content.reshape(-1, size) @ 256 ** np.arange(size)
