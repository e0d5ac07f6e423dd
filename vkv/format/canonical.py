"""Check that bytes are canonical msgpack (rule H1), without decoding them.

A stranger may have chosen the bytes of a header. Decoded without types, its smallest values
take 77 times their bytes, and keys that are numbers can be made to collide. So the bytes are
walked once, value by value, and no value is built.
"""

from __future__ import annotations

from vkv.errors import HeaderError
from vkv.format.limits import MAX_NESTED

_TEXT, _BYTES, _LIST, _MAP = range(4)
#: Tag -> bytes of a value of fixed size: nil, false, true, float64.
_FIXED = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCB: 9}
#: Tag -> bytes of an integer, and the least magnitude that takes so many.
_WHOLE = {0xCC: (1, 1 << 7), 0xCD: (2, 1 << 8), 0xCE: (4, 1 << 16), 0xCF: (8, 1 << 32)}
_NEGATIVE = {0xD0: (1, -33), 0xD1: (2, -129), 0xD2: (4, -32_769), 0xD3: (8, -(1 << 31) - 1)}
#: Tag -> kind of value, bytes of its count, and the least count that takes so many.
_SIZED = {
    0xC4: (_BYTES, 1, 0), 0xC5: (_BYTES, 2, 1 << 8), 0xC6: (_BYTES, 4, 1 << 16),
    0xD9: (_TEXT, 1, 32), 0xDA: (_TEXT, 2, 1 << 8), 0xDB: (_TEXT, 4, 1 << 16),
    0xDC: (_LIST, 2, 16), 0xDD: (_LIST, 4, 1 << 16),
    0xDE: (_MAP, 2, 16), 0xDF: (_MAP, 4, 1 << 16),
}  # fmt: skip
#: Upper half of a tag from 0x80 to 0xBF -> kind of value; the count is in the tag.
_SHORT = {8: _MAP, 9: _LIST, 10: _TEXT, 11: _TEXT}

#: An open map or list: values left, and the last key (``""``: none yet; ``None``: a list).
_Open = tuple[int, bytes | str | None]


def check(raw: bytes) -> None:
    """Refuse bytes that are not one canonical msgpack value.

    Takes about 0.3 s for 1 MiB of the smallest values, 0.1 s for 1 MiB of a usual header.

    Raises:
        HeaderError: Not msgpack, not in the shortest form, keys that are no strings, not
            sorted or not unique, float32, extensions, or nested too deep (H1).
    """
    try:
        end = _scan(raw)
    except IndexError:
        raise _refused("cut short", len(raw)) from None
    if end != len(raw):
        raise _refused("more bytes than values" if end < len(raw) else "cut short", end)


def _scan(raw: bytes) -> int:
    """Walk one value and what is in it; return where it ends."""
    at, left, last = 0, 1, None
    above: list[_Open] = []
    while True:
        while left == 0:
            if not above:
                return at
            left, last = above.pop()
        left -= 1
        if last is not None:
            at, last = _key(raw, at, last)
        tag = raw[at]
        if tag < 0x80 or tag >= 0xE0 or tag in _FIXED:
            at += _FIXED.get(tag, 1)
            continue
        if tag < 0xC0:  # most of a header, so without a call
            kind, count, at = _SHORT[tag >> 4], tag & (31 if tag >= 0xA0 else 15), at + 1
        else:
            kind, count, at = _begin(raw, at, tag)
        if kind < _LIST:
            at += count
            if kind == _TEXT and not raw[at - count : at].isascii():
                _check_text(raw, at - count, at)
        elif count:
            if len(above) == MAX_NESTED:
                raise _refused(f"nested deeper than {MAX_NESTED}", at)
            above.append((left, last))
            left, last = count, "" if kind == _MAP else None


def _begin(raw: bytes, at: int, tag: int) -> tuple[int, int, int]:
    """Return the kind of value that a tag from 0xC0 on begins, its count, and where it starts.

    A number has a count of 0.
    """
    kind, width, least = _SIZED.get(tag) or (_BYTES, *_number(tag, at))
    if at + width >= len(raw):
        raise _refused("cut short", at)
    count = int.from_bytes(raw[at + 1 : at + 1 + width], "big", signed=least < 0)
    if (count > least) if least < 0 else (count < least):
        raise _refused("not in its shortest form", at)
    return kind, count if tag in _SIZED else 0, at + 1 + width


def _number(tag: int, at: int) -> tuple[int, int]:
    width = _WHOLE.get(tag) or _NEGATIVE.get(tag)
    if width is None:
        raise _refused(
            f"a value of type {tag:#04x} (float32 or an extension), expected neither", at
        )
    return width


def _key(raw: bytes, at: int, last: bytes | str) -> tuple[int, bytes]:
    """Return the end of a key, and the key."""
    tag = raw[at]
    if 0xA0 <= tag < 0xC0:
        count, start = tag & 31, at + 1
    elif tag in (0xD9, 0xDA, 0xDB):
        _, count, start = _begin(raw, at, tag)
    else:
        raise _refused("a key that is not a string", at)
    stop = start + count
    key = raw[start:stop]
    if isinstance(last, bytes) and key <= last:
        raise _refused("keys that are not sorted, or not unique", at)
    if not key.isascii():
        _check_text(raw, start, stop)
    return stop, key


def _check_text(raw: bytes, start: int, stop: int) -> None:
    try:
        raw[start:stop].decode()
    except UnicodeDecodeError:
        raise _refused("text that is not UTF-8", start) from None


def _refused(found: str, at: int) -> HeaderError:
    return HeaderError(f"not canonical msgpack: {found}, at byte {at}", rule="H1", at="header")
