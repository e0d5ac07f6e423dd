"""Little-endian bit streams: codes of 1 to 8 bits, packed into 32-bit words.

Code ``i`` of a row occupies bits ``i * bits`` to ``(i + 1) * bits - 1`` of the row's
stream; bit ``j`` of the stream is bit ``j % 32`` of word ``j // 32``. A row ends at a
multiple of 32 bits; the bits after its last code are zero.

Eight codes of ``bits`` bits are ``bits`` bytes, so both ways work on eight codes at a
time inside one 64-bit integer: three shift-and-mask steps instead of one per code.
Long streams run those steps as one compiled kernel. On a CPU the first use of a kernel
on a machine costs a second or two of C++ compiler, which short streams are spared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx

__all__ = ["pack", "unpack", "words"]

#: Integers that hold eight codes of 1, 2, 4 and 8 bits exactly.
_INTEGERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
#: 64-bit integers from which on a kernel is worth compiling.
LONG = 1 << 17


def words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that a row of ``count`` codes takes."""
    return -(-count * bits // 32)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes along the last axis.

    Args:
        codes: ``(..., N)`` of any integer dtype; only the low ``bits`` bits are kept.
        bits: 1 to 8.

    Returns:
        U32 of shape ``(..., words(N, bits))``.
    """
    count = codes.shape[-1]
    codes = _padded(codes.astype(mx.uint8), -count % 32)
    eights = _fused(codes.view(mx.uint64), bits, _compress)
    if bits in _INTEGERS:
        stream = eights.astype(_INTEGERS[bits])
    else:
        stream = eights.view(mx.uint8).reshape(*eights.shape, 8)[..., :bits].flatten(-2)
    return stream.view(mx.uint32)[..., : words(count, bits)]


def unpack(stream: mx.array, bits: int, count: int) -> mx.array:
    """Return the first ``count`` codes of each row that ``pack`` wrote.

    Args:
        stream: U32 of shape ``(..., words(count, bits))`` or more words.
        bits: 1 to 8.
        count: Codes in a row.

    Returns:
        U8 of shape ``(..., count)``.
    """
    eights = -(-count // 8)
    data = stream.view(mx.uint8)
    data = _padded(data, max(0, eights * bits - data.shape[-1]))[..., : eights * bits]
    if bits in _INTEGERS:
        data = data.view(_INTEGERS[bits])
    else:
        data = _padded(data.reshape(*data.shape[:-1], eights, bits), 8 - bits).view(mx.uint64)
        data = data.squeeze(-1)
    return _fused(data.astype(mx.uint64), bits, _expand).view(mx.uint8)[..., :count]


def _padded(x: mx.array, count: int) -> mx.array:
    """Return ``x`` with ``count`` zeros after its last axis."""
    if not count:
        return x
    return mx.concatenate([x, mx.zeros((*x.shape[:-1], count), x.dtype)], axis=-1)


@cache
def _steps(bits: int) -> list[tuple[int, mx.array, mx.array]]:
    """Return shift, mask of even fields and mask of odd fields, for fields of 8, 16 and 32 bits."""
    steps: list[tuple[int, mx.array, mx.array]] = []
    if bits == 8:  # whole bytes: nothing moves
        return steps
    for field, used in ((8, bits), (16, 2 * bits), (32, 4 * bits)):
        even = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * field))
        shift = field - used
        steps.append((shift, mx.array(even, mx.uint64), mx.array(even << field, mx.uint64)))
    return steps


def _compress(x: mx.array, bits: int) -> mx.array:
    """Join the low ``bits`` bits of each of eight bytes, the first byte lowest."""
    for shift, even, odd in _steps(bits):
        x = (x & even) | ((x & odd) >> shift)
    return x


def _expand(x: mx.array, bits: int) -> mx.array:
    """Undo ``_compress``."""
    for shift, even, odd in reversed(_steps(bits)):
        x = (x & even) | ((x << shift) & odd)
    return x


def _fused(x: mx.array, bits: int, steps: Callable[[mx.array, int], mx.array]) -> mx.array:
    return _compiled(steps, bits)(x) if x.size >= LONG else steps(x, bits)


@cache
def _compiled(
    steps: Callable[[mx.array, int], mx.array], bits: int
) -> Callable[[mx.array], mx.array]:
    return mx.compile(lambda x: steps(x, bits), shapeless=True)
