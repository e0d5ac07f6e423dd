"""What tests of several codecs share."""

from __future__ import annotations

from math import prod

from vkv.codecs.protocol import Codec
from vkv.format.schema import ITEMSIZE


def fixed_bytes(codec: Codec, shape: tuple[int, ...]) -> int:
    """Return the stored bytes of the parts whose size the shape alone fixes."""
    return sum(
        prod(n for n in dims if n is not None) * ITEMSIZE[dtype]
        for dtype, dims in codec.layout(shape).values()
        if None not in dims
    )
