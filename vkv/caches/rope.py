"""Rotary embeddings of cached keys, undone and redone exactly.

A file stores the keys of a lossy codec as they were before the rotary embedding;
there they have fewer directions to spend bits on. Both ways go through
``mx.fast.rope`` in float32: with ``scale`` negated, its sines change sign and its
angles are the same to the bit, however they were rounded.

Its sines and cosines need not be good ones. Metal's are the fast ones, which may be
wrong by 1e-4, and more at far positions: there and back is then not one but
``cos^2 + sin^2``. What that makes of ones is divided out.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import mlx.core as mx

from vkv.caches.positions import Positions, rows, runs
from vkv.codecs.kernels.device import on_cpu
from vkv.errors import CacheError, HeaderError
from vkv.format.header_rules import check_rope
from vkv.format.schema import Rope

__all__ = ["rotate", "usable"]

#: Largest error of there and back, relative to the largest key; 2e-7 is usual.
TOLERANCE = 1e-5
#: Rows at either end that stand for all where a backend's precision is tried.
SAMPLE = 32
#: ``cos^2 + sin^2`` so near to one is exact; the CPU is within 3e-7.
PRECISE = 1e-6


def rotate(
    x: mx.array,
    rope: Rope,
    positions: Positions,
    *,
    inverse: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Apply ``rope`` to keys, or undo it.

    Forward, the result has the bits that the model's own rope layer gives for ``x``
    in float32. The work is one ``mx.fast.rope`` for each run of consecutive
    positions; a wrapped ring has at most three.

    Args:
        x: Keys, ``(B, H, T, D)``, any float dtype.
        rope: Rotates the first ``rope.dims`` of ``D`` channels.
        positions: Of the ``T`` rows.
        inverse: Undo instead of apply.
        dtype: Of the result, which is rounded once.

    Returns:
        ``(B, H, T, D)``.

    Raises:
        HeaderError: ``rope`` cannot rotate ``D`` channels (H2).
        CacheError: Not ``T`` positions, or one outside 0 to ``MAX_POSITION`` (L5).
    """
    check_rope(rope, x.shape[-1])
    spans = runs(positions, x.shape[-2])
    # On a GPU the kernel computes in float32 whatever it reads and writes.
    narrow = x.dtype == dtype and rope.mscale == 1.0 and not inverse and not on_cpu()
    x = x if narrow else x.astype(mx.float32)
    if rope.mscale != 1.0 and not inverse:
        x = x.at[..., : rope.dims].multiply(rope.mscale)
    turn = _undo if inverse else _turn
    if len(spans) == 1:
        x = turn(x, rope, spans[0].start)
    elif spans:
        cuts = list(accumulate(len(span) for span in spans[:-1]))
        pieces = zip(mx.split(x, cuts, axis=-2), spans, strict=True)
        x = mx.concatenate([turn(p, rope, s.start) for p, s in pieces], axis=-2)
    if rope.mscale != 1.0 and inverse:
        x = x.at[..., : rope.dims].divide(rope.mscale)
    return x.astype(dtype)


def _undo(x: mx.array, rope: Rope, offset: int) -> mx.array:
    *_, count, dim = x.shape
    x, last = _turn(x, rope, offset, -1.0), min(count, SAMPLE)
    fine = mx.abs(_gain(rope, offset + count - last, (last, dim)) - 1).max() < PRECISE
    return x if fine else x / _gain(rope, offset, (count, dim))


def _gain(rope: Rope, offset: int, shape: tuple[int, int]) -> mx.array:
    """Return ``cos^2 + sin^2`` of every row and channel, as there and back makes it."""
    return _turn(_turn(mx.ones((1, 1, *shape)), rope, offset), rope, offset, -1.0)


def _turn(x: mx.array, rope: Rope, offset: int, sign: float = 1.0) -> mx.array:
    return mx.fast.rope(
        x,
        rope.dims,
        traditional=rope.traditional,
        base=rope.base,
        scale=sign * rope.scale,
        offset=offset,
        freqs=None if rope.freqs is None else _freqs(rope.freqs),
    )


@lru_cache(maxsize=64)
def _freqs(values: tuple[float, ...]) -> mx.array:
    """The array of a header's ``freqs``, made once for all layers that share them."""
    return mx.array(values, dtype=mx.float32)


def usable(rope: Rope, keys: mx.array, positions: Positions) -> bool:
    """Return whether undoing and redoing ``rope`` gives ``keys`` back.

    Tried in numbers, on the first and the last ``SAMPLE`` rows. Keys of another
    form, rows that are not finite, and a rope that does not fit are not usable.

    Args:
        rope: The rope that the keys went through.
        keys: ``(B, H, T, D)``, any float dtype.
        positions: Of the ``T`` rows.
    """
    if keys.ndim != 4 or not mx.issubdtype(keys.dtype, mx.floating):  # B, H, T, D
        return False
    try:
        where = rows(positions, keys.shape[-2])
        ends = (slice(SAMPLE), slice(-SAMPLE, None))
        return all(_comes_back(keys[..., end, :], rope, where[end]) for end in ends)
    except (HeaderError, CacheError):
        return False


def _comes_back(x: mx.array, rope: Rope, positions: Positions) -> bool:
    x = x.astype(mx.float32)
    back = rotate(rotate(x, rope, positions, inverse=True), rope, positions)
    if not x.size:
        return True
    return bool(mx.abs(back - x).max() <= TOLERANCE * mx.abs(x).max())  # false for NaN
