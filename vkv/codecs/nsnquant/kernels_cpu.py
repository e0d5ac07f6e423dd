"""``nsnquant`` decoded on a CPU by table: what MLX does in ten passes, in NumPy and four.

The rotation of ``D = 8 n`` channels is the one of ``n`` pieces after that of the 8 values
inside each, and a piece is one of 65,536: an index and a sign byte. So one lookup gives a
piece negated and rotated, and a thin matrix product does the rest. It takes a third of
the time of ``nsn.decode``, from which it differs as ``spec/v1/codecs/nsnquant.md`` allows.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs.nsnquant import hadamard
from vkv.codecs.nsnquant.codebook_search import SINGLE
from vkv.codecs.protocol import Parts, memory
from vkv.format.dtypes import F16_MAX

__all__ = ["PIECE", "decode", "fits"]

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

#: Values of a piece, which are looked up together.
PIECE = 8
#: A piece of float32 as one item, which NumPy moves at once.
ITEM = np.dtype((np.void, 4 * PIECE))
#: Elements of one step: four bytes each, with as much scratch, stay in a core's cache.
STEP = 1 << 17
#: A float32 times ``2^-112`` has a float16's exponent, three bits higher.
TO_HALF = 2.0**-112


def fits(dim: int, subvector: int) -> bool:
    """Return whether ``decode`` can decode pieces of ``subvector`` values in ``dim`` channels."""
    order = hadamard.order(dim)
    return subvector == PIECE and order is not None and dim % (order * PIECE) == 0


def decode(
    parts: Parts, s1: mx.array, s2: mx.array, o: mx.array, shape: tuple[int, ...], dtype: mx.Dtype
) -> mx.array:
    """Compute ``s1 * (s2 * H(code) + o)`` as an evaluated array.

    Args:
        parts: ``codebook``, ``indices`` and maybe ``signs``, validated.
        s1: F32, one a token, ``N`` in all.
        s2: The same.
        o: F32 ``(M, D)``; each row shifts ``N / M`` tokens.
        shape: ``(..., D)``, ``N * D`` elements; ``fits(D, 8)``.
        dtype: F16, BF16 or F32. Ties are rounded away from zero.
    """
    out = mx.zeros(shape, dtype)
    mx.eval(out, s1, s2, o)
    scale = sqrt(TO_HALF) if dtype == mx.float16 else 1.0
    call = _Call(parts, np.asarray(s1), np.asarray(s2), np.asarray(o), scale)
    item, cast = np.dtype((np.void, PIECE * dtype.size)), _CASTS[dtype]
    rows = np.frombuffer(memory(out), item).reshape(-1, shape[-1] // PIECE)
    for start in range(0, len(rows), call.step):
        stop = min(start + call.step, len(rows))
        y = cast(call.pieces(start, stop))
        rows[start:stop] = y.view(item).T
    return out


class _Call:
    """One tensor: its tables, and the steps of tokens made from them."""

    def __init__(self, parts: Parts, s1: Array, s2: Array, o: Array, scale: float):
        self._indices, signs = _flat(parts["indices"]), parts.get("signs")
        self._signs = None if signs is None else _flat(signs)
        codebook = np.asarray(parts["codebook"])
        self._table = _rotated(codebook.tobytes(), signs is not None).view(ITEM)[:, 0]
        count = o.shape[-1] // PIECE
        self._turn = _core(count)
        self.step = max(1, STEP // o.shape[-1])
        self._s1, self._s2 = s1.reshape(-1) * np.float32(scale), s2.reshape(-1)
        # A row for each piece, so that a step's arithmetic runs along all of its tokens.
        o = (o * np.float32(scale)).reshape(len(o), count, PIECE).transpose(1, 0, 2)
        self._o = np.ascontiguousarray(o).view(ITEM)[..., 0]
        self._window = len(self._s1) // self._o.shape[1]
        self._limit = self._clip(np.abs(codebook).max(), scale, np.abs(o).max(initial=0))
        self._s2 = self._s2 * np.float32(scale / sqrt(o.shape[0] * PIECE))

    def _clip(self, top: float, scale: float, shift: float) -> float | None:
        """Return the bound to clip values at, if F16 is wanted and any may pass its range."""
        high = scale * sqrt(self._o.shape[0] * PIECE) * float(top) * np.abs(self._s2).max() + shift
        cut = F16_MAX * scale * scale
        return cut if scale != 1 and np.abs(self._s1).max() * high > cut else None

    def pieces(self, start: int, stop: int) -> Floats:
        """Return tokens ``start`` to ``stop - 1``, ``(n, (stop - start) * 8)``."""
        code = self._indices[start:stop].astype(np.uint16)
        if self._signs is not None:
            code |= self._signs[start:stop].astype(np.uint16) << 8
        x = np.take(self._table, code.T, mode="clip").view(np.float32)
        y = np.empty_like(x)
        wide = max(PIECE, SINGLE // len(x) ** 2)
        for i in range(0, x.shape[1], wide):
            np.matmul(self._turn, x[:, i : i + wide], out=y[:, i : i + wide])
        window = np.arange(start, stop) // self._window
        y *= np.repeat(self._s2[start:stop], PIECE)
        y += np.take(self._o, window, axis=1).view(np.float32)
        y *= np.repeat(self._s1[start:stop], PIECE)
        return y if self._limit is None else y.clip(-self._limit, self._limit)


def _flat(part: mx.array) -> Array:
    return np.asarray(part.reshape(-1, part.shape[-1]))


@lru_cache(maxsize=8)
def _core(count: int) -> Floats:
    """Return the rotation of ``count`` pieces, in ones and minus ones."""
    with mx.stream(mx.cpu):
        rows = hadamard.forward(mx.eye(count)) if count > 1 else mx.ones((1, 1))
        return np.ascontiguousarray(np.sign(np.asarray(rows)).T)


@lru_cache(maxsize=4)
def _rotated(codebook: bytes, signed: bool) -> Floats:
    """Return all pieces, rotated, times ``sqrt(8)``: row ``index``, or ``signs * 256 + index``."""
    rows = np.frombuffer(codebook, np.float16).astype(np.float32).reshape(-1, PIECE)
    if signed:
        padded = np.zeros((256, PIECE), np.float32)
        padded[: len(rows)] = rows
        signs = 1 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, 8, "little")
        rows = (signs[:, None] * padded).reshape(-1, PIECE).astype(np.float32)
    steps = np.array([rows[i : i + 4096] @ _core(PIECE) for i in range(0, len(rows), 4096)])
    return np.ascontiguousarray(steps.reshape(-1, PIECE))


def _same(y: Floats) -> Array:
    return y


def _halves(y: Floats) -> Array:
    """Return F16 bits of ``y / TO_HALF``: move the sign to the exponent, round, drop 13 bits."""
    bits = y.view(np.uint32)
    out = bits >> 3
    out &= 1 << 28
    out += bits
    out += 1 << 12
    out >>= 13
    return out.astype(np.uint16)


def _brains(y: Floats) -> Array:
    """Return BF16 bits of ``y``."""
    out = y.view(np.uint32) + (1 << 15)
    out >>= 16
    return out.astype(np.uint16)


_CASTS = {mx.float16: _halves, mx.bfloat16: _brains, mx.float32: _same}
