"""Describe channels: what is subtracted from their heads, and which are coded together.

Channels differ in size by powers of two, and keys also in form: some keep one sign and
one magnitude, others swing about zero. An offset per channel makes sizes alike; groups
give channels of one form an entropy code of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vkv.codecs.lossless.planes import TOP, U8, U16, WordLayout
from vkv.errors import CodecError

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]

#: Most groups: bit 7 of a channel's byte is its sign.
MAX_GROUPS = 128
#: A group's table costs some 80 bytes: .03 bits an element at so many elements.
GROUP_ELEMENTS = 3 << 13
#: The mean level becomes this one of 127: magnitudes fall off fast above their mean and
#: slowly below it. One octave is 8 levels in BF16 and F32, 4 in F16.
CENTRE = 88
#: Offsets of channels learnt on fewer tokens cost more than they bring.
MIN_TOKENS = 24
#: Tokens that are looked at, spread over all.
SAMPLE = 128
#: Rounds of clustering; five bring .01 bits more.
ROUNDS = 2
#: Bins of a histogram: the sign and the first 5 bits of the level.
BINS = 64


@dataclass(frozen=True, slots=True)
class Channels:
    """Hold what a record says of its channels.

    Args:
        base: Smallest offset of a level, 0 to 65,535.
        delta: Offset of each channel above ``base``, ``(channels,)``.
        group: Group of each channel, counted from 0, ``(channels,)``.
        flips: Whether the signs of a channel are inverted, 0 or 1, ``(channels,)``.
    """

    base: int
    delta: U8
    group: U8
    flips: U8

    def offsets(self, layout: WordLayout) -> U16:
        """Return what is subtracted from the heads of each channel, modulo 65,536 (X7)."""
        return self.delta + np.uint16(self.base) + self.flips * np.uint16(layout.sign)

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """Channels in the order of their groups."""
        return np.argsort(self.group, kind="stable")

    @property
    def place(self) -> npt.NDArray[np.intp] | None:
        """Return where each channel stands in ``order``; ``None`` where all are one group."""
        if not self.group.any():
            return None
        place = np.empty(self.group.size, np.intp)
        place[self.order] = np.arange(self.group.size)
        return place

    def sizes(self) -> list[int]:
        """Return the number of channels of each group."""
        return [int(n) for n in np.bincount(self.group)]

    def dump(self) -> bytes:
        """Return the content of a record's first frame (X6)."""
        return self.delta.tobytes() + (self.group | self.flips << 7).tobytes()


def load(base: int, content: bytes) -> Channels:
    """Read the content of a record's first frame.

    Raises:
        CodecError: A group is left out (X6).
    """
    delta, group = np.frombuffer(content, np.uint8).reshape(2, -1)
    found = Channels(base, delta, group & np.uint8(0x7F), group >> np.uint8(7))
    if 0 in found.sizes():
        raise CodecError(
            f"groups {np.unique(found.group).tolist()}, expected none left out",
            rule="X6",
            at="codes",
        )
    return found


def choose(upper: U16, layout: WordLayout, most: int) -> Channels:
    """Choose offsets and groups for upper halves ``(tokens, channels)``.

    Args:
        upper: Upper halves of the values of one record.
        layout: Of their dtype.
        most: Groups at most; fewer where a record has few elements.
    """
    most = min(most, upper.size // GROUP_ELEMENTS)
    sample = upper[:: -(-len(upper) // SAMPLE)]
    tokens, channels = sample.shape
    levels = (sample >> layout.low_bits & layout.sign - 1).astype(np.int16)
    signs = sample >> 15
    flips, group = np.zeros(channels, np.uint8), np.zeros(channels, np.uint8)
    centres = _centres(levels)
    if tokens < MIN_TOKENS:
        offsets = np.full(channels, int(centres.mean()) - CENTRE, np.int16)
    else:
        offsets = np.rint(centres).astype(np.int16) - CENTRE
        flips = (signs.sum(0, dtype=np.uint32) * 2 > tokens).astype(np.uint8)
        if most > 1 and channels > 1:
            group = cluster(_histograms(levels - offsets, signs ^ flips), most)
    base = int(offsets.min())
    delta = (offsets - base).clip(0, 255).astype(np.uint8)
    return Channels(base % (1 << 16), delta, group, flips)


def _centres(levels: I16) -> F32:
    """Mean level of each channel, ``(channels,)``; zeros count as very small values."""
    centres: F32 = np.maximum(levels, levels.max(0) - TOP).mean(0, dtype=np.float32)
    return centres


def _histograms(relative: I16, signs: U16) -> F32:
    """Histograms of channels, ``(channels, BINS)``, of levels and signs ``(tokens, channels)``."""
    bins = relative.clip(0, TOP) >> 2 | signs.astype(np.int16) << 5
    places = bins + BINS * np.arange(relative.shape[1])
    counts = np.bincount(places.reshape(-1), minlength=BINS * relative.shape[1])
    return counts.reshape(-1, BINS).astype(np.float32)


def cluster(histograms: F32, most: int) -> U8:
    """Group channels so that one code for each group takes few bits.

    Lloyd's algorithm with the cross entropy as distance, from channels sorted by how
    concentrated they are.

    Args:
        histograms: Of each channel, ``(channels, bins)``, all of one sum.
        most: Groups at most.

    Returns:
        Group of each channel, counted from 0, ``(channels,)``.
    """
    concentration = np.einsum("cb,cb->c", histograms, histograms)
    group = np.empty(len(histograms), np.intp)
    group[np.argsort(-concentration, kind="stable")] = (
        np.arange(len(histograms)) * most // len(histograms)
    )
    for _ in range(ROUNDS):
        sums = np.stack([histograms[group == g].sum(0) for g in range(most)])
        sums += np.float32(0.1)  # no symbol is impossible
        bits = -np.log2(sums / sums.sum(1, keepdims=True))
        # small products: einsum runs in this thread, where matmul would wake those of its library
        group = np.einsum("cb,gb->cg", histograms, bits).argmin(1)
    return np.unique(group, return_inverse=True)[1].astype(np.uint8)
