"""A second decoder of ``nsnquant``, from ``spec/v1/codecs/nsnquant.md`` alone: NumPy, F64."""

from __future__ import annotations

from typing import Any

import numpy as np

#: First rows of the circulant blocks of H_20 and H_28.
BLOCKS = {
    20: (
        "+---- +---- ++--+ +-++-",
        "-++++ +---- -+--+ ++--+",
        "--++- +-++- +---- -++++",
        "-+--+ --++- +---- +----",
    ),
    28: (
        "+------ ++----+ +-+--+- +--++--",
        "--++++- +------ -++--++ +-+--+-",
        "-+-++-+ +--++-- +------ --++++-",
        "-++--++ -+-++-+ ++----+ +------",
    ),
}


def decode(
    parts: dict[str, np.ndarray], params: dict[str, Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Parts to values, F32."""
    batch, heads, tokens, dim = shape
    window = params["window"]
    wide = {name: part.astype(np.float64) for name, part in parts.items() if part.dtype == "<f2"}
    code = wide["codebook"][parts["indices"]].reshape(shape)
    if params["bits"] == 2:
        negative = np.unpackbits(parts["signs"], axis=-1, bitorder="little")
        code = np.where(negative, -code, code)
    if params["metadata_bits"] == 16:
        s1, o = wide["s1"], wide["o"]
    else:
        s1 = nibbles(parts["s1"], window) * wide["s1_range"][..., :1] + wide["s1_range"][..., 1:]
        groups = nibbles(parts["o"], dim).reshape(*parts["o_range"].shape[:-1], 32)
        o = groups * wide["o_range"][..., :1] + wide["o_range"][..., 1:]
    s1, s2 = s1.reshape(batch, heads, tokens, 1), wide["s2"][..., None]
    o = np.repeat(o.reshape(batch, heads, -1, dim), window, axis=2)
    return (s1 * (s2 * (code @ hadamard(dim).T) + o)).astype(np.float32)


def nibbles(words: np.ndarray, count: int) -> np.ndarray:
    """The 4-bit codes of each row, low bits first."""
    codes = words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return codes.reshape(*words.shape[:-1], -1)[..., :count]


def hadamard(dim: int) -> np.ndarray:
    """The matrix H, divided by sqrt(dim)."""
    m = next(m for m in (1, 12, 20, 28) if dim % m == 0 and (dim // m).bit_count() == 1)
    h = core(m)
    while len(h) < dim:
        h = np.kron(h, [[1, 1], [1, -1]])
    return h / np.sqrt(dim)


def core(m: int) -> np.ndarray:
    if m == 1:
        return np.ones((1, 1))
    if m == 12:
        conference = np.ones((6, 6))
        conference[0, 0] = 0
        conference[1:, 1:] = circulant([0, 1, -1, -1, 1])
        return np.kron(np.eye(6), [[1, -1], [-1, -1]]) + np.kron(conference, [[1, 1], [1, -1]])
    rows = [[circulant([1 if c == "+" else -1 for c in b]) for b in r.split()] for r in BLOCKS[m]]
    return np.block(rows)


def circulant(first: list[int]) -> np.ndarray:
    return np.array([np.roll(first, i) for i in range(len(first))])
