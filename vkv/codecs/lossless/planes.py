"""Split floating-point words into symbols and low bits, and put them together again.

The bits of a value are not equally random. Sign, exponent and the first bits of the
mantissa follow the distribution of the values; the other bits are noise. So each value
becomes a *symbol* of 8 bits, which an entropy coder makes smaller, and *low bits*, which
are stored as they are (rules X7 to X10 of ``spec/v1/codecs/lossless.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
#: Values of one dtype, seen as unsigned integers: 16 or 32 bits.
Words = npt.NDArray[np.unsignedinteger]

#: Greatest level of a symbol; bit 7 is its sign.
TOP = 0x7F
SIGN = 0x80


@dataclass(frozen=True, slots=True)
class WordLayout:
    """Say how the bits of a dtype are divided.

    The *upper half* of a value is its upper 16 bits: a sign and 15 bits of magnitude. It
    consists of a *head*, which is the sign and a *level*, and of ``low_bits``.

    Args:
        word: NumPy dtype of a whole value.
        low_bits: Last bits of the upper half that are not part of the head: 4 or 8.
    """

    word: str
    low_bits: int

    @property
    def sign(self) -> int:
        """The bit of the sign in a head: 2,048 or 128; levels are below it."""
        return 1 << (15 - self.low_bits)

    @property
    def has_escapes(self) -> bool:
        """Return whether there are levels that a symbol cannot say."""
        return self.sign > SIGN

    def plane_shapes(self, tokens: int, channels: int) -> list[tuple[int, int]]:
        """Shape of each plane of low bits, a byte an entry."""
        first = channels if self.low_bits == 8 else (channels + 1) // 2
        return [(tokens, first)] + [(tokens, channels)] * (np.dtype(self.word).itemsize - 2)


LAYOUTS = {"BF16": WordLayout("<u2", 4), "F16": WordLayout("<u2", 8), "F32": WordLayout("<u4", 4)}


def upper_half(words: Words) -> U16:
    """Return the upper 16 bits of values of any shape."""
    return (words >> 16).astype(np.uint16) if words.itemsize == 4 else words.astype("<u2")


def symbols(upper: U16, offsets: U16, layout: WordLayout) -> tuple[U8, U16]:
    """Code heads relative to an offset of their channel.

    Args:
        upper: Upper halves, ``(tokens, channels)``.
        offsets: Subtracted from the heads of a channel, ``(channels,)``.
        layout: Of the dtype.

    Returns:
        Symbols ``(tokens, channels)``: the sign in bit 7 and the level below it, of the
        head minus its offset. And heads that no symbol can say: their symbol is 0.
    """
    head = upper >> layout.low_bits
    relative = head - offsets
    coded = relative.astype(np.uint8)
    if not layout.has_escapes:
        return coded, np.empty(0, np.uint16)
    coded &= np.uint8(TOP)
    signs = (relative >> 4).astype(np.uint8)  # moves the sign from bit 11 to bit 7
    signs &= np.uint8(SIGN)
    coded |= signs
    relative &= layout.sign - 1 - TOP
    if relative.any():
        coded[relative != 0] = 0
    return coded, head[coded == 0] if not coded.all() else np.empty(0, np.uint16)


def low_planes(words: Words, upper: U16, layout: WordLayout) -> list[U8]:
    """Return the low bits as planes of bytes: those of the upper half, then whole bytes.

    With 4 bits, channel ``i`` shares a byte with the one half of all channels behind it.

    Args:
        words: Values ``(tokens, channels)``.
        upper: Their upper halves.
        layout: Of their dtype.
    """
    low = upper.astype(np.uint8)
    if layout.low_bits == 4:
        half = (low.shape[1] + 1) // 2
        low, second = low[:, :half] & np.uint8(15), low[:, half:]
        low[:, : second.shape[1]] |= second << np.uint8(4)
    data: U8 = words.view(np.uint8).reshape(*words.shape, -1)
    return [low, *(data[..., i] for i in range(data.shape[-1] - 3, -1, -1))]


def merge(coded: U8, escapes: U16, planes: list[U8], offsets: U16, layout: WordLayout) -> Words:
    """Undo ``symbols`` and ``low_planes``.

    Args:
        coded: Symbols, ``(tokens, channels)``.
        escapes: As many as there are symbols of 0, if the dtype has any.
        planes: Of the shapes that the layout gives.
        offsets: Of the channels.
        layout: Of the dtype.

    Returns:
        Values as integers, ``(tokens, channels)``.
    """
    upper = coded.astype(np.uint16)
    if layout.has_escapes:
        signs = upper & SIGN
        signs *= np.uint16(layout.sign // SIGN - 1)  # moves the sign from bit 7 to bit 11
        upper += signs
    upper += offsets
    if escapes.size:
        upper[coded == 0] = escapes
    upper <<= layout.low_bits
    if layout.low_bits == 4:
        half = planes[0].shape[1]
        upper[:, :half] |= planes[0] & 15
        upper[:, half:] |= planes[0][:, : upper.shape[1] - half] >> 4
    else:
        upper |= planes[0]
    return upper if layout.word == "<u2" else _widen(upper, planes[1:])


def _widen(upper: U16, planes: list[U8]) -> Words:
    """Values of 32 bits from their upper halves and two planes of bytes."""
    out = np.empty((*upper.shape, 4), np.uint8)
    out.view("<u2")[..., 1] = upper
    out[..., 1], out[..., 0] = planes
    return out.view("<u4")[..., 0]
