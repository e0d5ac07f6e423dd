"""A second decoder of ``tc``, from ``spec/v1/codecs/tc.md`` alone: NumPy, F64, no pcodec."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def decode(
    parts: dict[str, np.ndarray], params: dict[str, Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Parts to values, F32; no param matters."""
    batch, heads, tokens, dim = shape
    rows = axes(bytes(parts["basis"]), heads * dim)
    groups, count, _ = rows.shape
    data = bytes(parts["codes"])
    step, width = struct.unpack("<fI", data[:8])
    chunk, factor = parts["components"].T.astype(int)
    q = np.zeros((groups * count, batch * tokens))
    at = 8
    for c in range(chunk[chunk < 255].max(initial=-1) + 1):
        mine = np.flatnonzero(chunk == c)
        values, at = sized(data, at, len(mine) * batch * tokens, width)
        q[mine] = values.reshape(len(mine), batch * tokens)
    assert at == len(data)
    y = (step * (128 + factor) / 256)[:, None] * q
    x = np.einsum("grt,grn->gnt", y.reshape(groups, count, batch * tokens), rows)
    x = x.reshape(heads, dim, batch, tokens) + parts["mean"].astype(float)[..., None, None]
    return x.transpose(2, 0, 3, 1).astype(np.float32)


def axes(data: bytes, channels: int) -> np.ndarray:
    """The rows (G, R, n) of a basis; unit rows for the empty one."""
    if not data:
        return np.eye(channels)[None]
    groups, count, columns = struct.unpack("<III", data[:12])
    total = groups * count
    at = 12 + 4 * total
    scale = np.frombuffer(data[12:at], "<f4").astype(float)
    ints = np.zeros((total, columns))
    step = -(-16384 // columns)
    for a in range(0, total, step):
        piece = ints[a : a + step]
        values, at = sized(data, at, piece.size, 2)
        piece[:] = values.reshape(piece.shape)
    assert at == len(data)
    return (ints * scale[:, None]).reshape(groups, count, columns)


def sized(data: bytes, at: int, count: int, width: int) -> tuple[np.ndarray, int]:
    """The chunk at ``at``, and where the next one starts."""
    (size,) = struct.unpack_from("<I", data, at)
    return integers(data[at + 4 : at + 4 + size], count, width), at + 4 + size


class Bits:
    """Little-endian bits, the lowest of a byte first."""

    def __init__(self, data: bytes):
        self.bits, self.at, self.end = int.from_bytes(data, "little"), 0, 8 * len(data)

    def read(self, count: int) -> int:
        value = self.bits >> self.at & (1 << count) - 1
        self.at += count
        assert self.at <= self.end
        return value

    def align(self) -> None:
        assert self.read(-self.at % 8) == 0


def integers(data: bytes, count: int, width: int) -> np.ndarray:
    """A chunk of ``count`` integers."""
    reader, size = Bits(data), 8 * width
    assert reader.read(8) == 0
    log = reader.read(4)
    bins = []
    for _ in range(reader.read(15)):
        weight, lower = reader.read(log) + 1, reader.read(size)
        bins.append((weight, lower, reader.read(size.bit_length())))
    reader.align()
    nodes = table([weight for weight, _, _ in bins], log)
    states = [reader.read(log) for _ in range(4)]
    reader.align()
    found: list[int] = []
    for start in range(0, count, 256):
        symbols = []
        for i in range(min(256, count - start)):
            symbol, base, bits = nodes[states[i % 4]]
            symbols.append(symbol)
            states[i % 4] = base + reader.read(bits)
        found += [bins[s][1] + reader.read(bins[s][2]) for s in symbols]
    reader.align()
    assert reader.at == reader.end
    return np.array(found, np.int64) - (1 << size - 1)


def table(weights: list[int], log: int) -> list[tuple[int, int, int]]:
    """Of each state: its bin, the base of the next state, and the bits to add to it."""
    size = 1 << log
    assert sum(weights) == size
    stride = 3 * size // 5 | 1
    order = [0] * size
    place = 0
    for symbol, weight in enumerate(weights):
        for _ in range(weight):
            order[place * stride % size] = symbol
            place += 1
    following, nodes = list(weights), []
    for symbol in order:
        bits = log - (following[symbol].bit_length() - 1)
        nodes.append((symbol, (following[symbol] << bits) - size, bits))
        following[symbol] += 1
    return nodes
