"""Give the bytes of MLX arrays, as a file holds them, from where they are and without a copy."""

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
    """Bytes of an evaluated array in host memory, one piece for each contiguous block.

    A cache's buffer is longer than its tokens: those of each head are a block of their own.
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
    """Return the number of leading axes along which blocks are not contiguous."""
    axes = 0
    while not blocks.flags.c_contiguous:
        blocks, axes = blocks[0], axes + 1
    return axes


def stored(x: mx.array) -> Pieces:
    """Evaluate ``x`` and return its bytes in row-major order, wherever they are."""
    gpu = cuda.device()
    if gpu is not None and x.nbytes >= cuda.LEAST:
        return cuda.Bytes(gpu, x)
    mx.eval(x)
    return Bytes(x)


def copied(x: mx.array) -> bytes:
    """Return a copy of the bytes of ``x``."""
    return b"".join(bytes(piece) for piece in stored(x))


def digest(x: mx.array) -> bytes:
    """Return the BLAKE3 digest of the bytes that ``x`` is stored as."""
    state = blake3()
    for piece in stored(x):
        state.update(piece)
    return state.digest()
