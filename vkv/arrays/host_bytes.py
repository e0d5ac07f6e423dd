"""The bytes of MLX arrays, as a file holds them, from where they are and without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3

from vkv.arrays import cuda
from vkv.format.container_write import Pieces

#: Smaller pieces cost more to handle than a copy of the whole array.
LEAST = 1 << 12
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Bytes:
    """An evaluated array in host memory: one piece for each block that lies together.

    The tokens that a cache holds lie apart, head by head, where its buffer is longer.
    """

    def __init__(self, x: mx.array):
        # NumPy knows no bfloat16; whole numbers of the same size will do.
        self._blocks: np.ndarray[Any, Any] = np.asarray(x.view(_UNSIGNED[x.dtype.size]))
        self.nbytes = x.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        if self.nbytes == 0:
            return
        blocks = self._blocks
        axes = _apart(blocks)
        if prod(blocks.shape[axes:]) * blocks.itemsize < LEAST:
            blocks, axes = np.ascontiguousarray(blocks), 0
        for index in product(*map(range, blocks.shape[:axes])):
            yield np.ascontiguousarray(blocks[index]).data.cast("B")


def _apart(blocks: np.ndarray[Any, Any]) -> int:
    """Leading axes whose items do not lie together."""
    axes = 0
    while not blocks.flags.c_contiguous:
        blocks, axes = blocks[0], axes + 1
    return axes


def stored(x: mx.array) -> Pieces:
    """The bytes of ``x`` in row-major order, wherever it is. Evaluates it."""
    gpu = cuda.device()
    if gpu is not None and x.nbytes >= cuda.LEAST:
        return cuda.Bytes(gpu, x)
    mx.eval(x)
    return Bytes(x)


def copied(x: mx.array) -> bytes:
    """The bytes of ``x``, in memory of their own."""
    return b"".join(bytes(piece) for piece in stored(x))


def digest(x: mx.array) -> bytes:
    """BLAKE3 of the bytes that ``x`` is stored as."""
    state = blake3()
    for piece in stored(x):
        state.update(piece)
    return state.digest()
