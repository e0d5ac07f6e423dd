"""Write records, as ``vkv.codecs.lossless.records`` reads them."""

from __future__ import annotations

import numpy as np

from vkv.codecs.lossless import frames
from vkv.codecs.lossless.channels import choose
from vkv.codecs.lossless.planes import (
    U8,
    WordLayout,
    Words,
    low_planes,
    symbols,
    upper_half,
)
from vkv.codecs.lossless.records import CODED, STORED
from vkv.format.limits import MAX_EXPANSION


def encode(values: Words, layout: WordLayout, groups: int) -> bytes:
    """Return a record of values ``(tokens, ...)``, in at most so many groups."""
    words = np.ascontiguousarray(values).reshape(len(values), -1)
    base, content = _divide(words, layout, groups)
    body = b"".join(map(_compress, content))
    kind = CODED
    if len(body) > words.nbytes:
        kind, base, body = STORED, 0, _compress(words)
    head = bytes([*len(words).to_bytes(4, "little"), kind, *base.to_bytes(2, "little")])
    # a record of equal values is made larger: it would ask for too much memory (X4)
    body = (head + body).ljust(-(-words.size // MAX_EXPANSION) - 4, b"\0")
    return len(body).to_bytes(4, "little") + body


def _divide(words: Words, layout: WordLayout, groups: int) -> tuple[int, list[U8]]:
    """Base of the offsets, and content of the frames, for values ``(tokens, channels)``."""
    upper = upper_half(words)
    channels = choose(upper, layout, groups)
    coded, escapes = symbols(upper, channels.offsets(layout), layout)
    if channels.place is not None:
        coded = coded.take(channels.order, 1, mode="clip")
    content = [
        np.frombuffer(channels.dump(), np.uint8),
        *np.split(coded, np.cumsum(channels.sizes()[:-1]), axis=1),
        *low_planes(words, upper, layout),
    ]
    if layout.has_escapes:
        content.append(escapes.astype("<u2").view(np.uint8))
    return channels.base, content


def _compress(content: U8 | Words) -> bytes:
    return frames.compress(np.ascontiguousarray(content).data.cast("B") if content.size else b"")
