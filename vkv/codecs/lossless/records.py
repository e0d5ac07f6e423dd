"""Read records: consecutive tokens of a tensor, coded on their own.

A record needs nothing from the others, so that records are coded in several threads, a
cache that grows gets more of them, and a shorter one keeps the first (rules X3 to X11 of
``spec/v1/codecs/lossless.md``)::

    U32          bytes of the rest of the record
    U32          tokens
    U8           0: coded, 1: stored
    U16          base of the offsets; of a stored record 0
    frames       coded:
                   of each channel the offset above the base, then group and flip
                   the symbols of each group
                   planes of low bits
                   escapes, U16 each; not in F16
                 stored: the values
    zeros        any number
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from vkv.codecs.lossless import frames
from vkv.codecs.lossless.channels import Channels, load
from vkv.codecs.lossless.planes import (
    U8,
    U16,
    WordLayout,
    Words,
    merge,
)
from vkv.errors import CodecError

#: Bytes of size, tokens, kind and base.
HEAD = 11
CODED, STORED = 0, 1


@dataclass(frozen=True, slots=True)
class Record:
    """A coded record that was looked through and not yet decoded.

    Args:
        tokens: Covered.
        channels: What it says of its channels.
        groups: Frame of each group.
        planes: Frames of the low bits.
        escapes: Frame of the escapes, if the dtype has any.
    """

    tokens: int
    channels: Channels
    groups: list[memoryview]
    planes: list[memoryview]
    escapes: memoryview | None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of values as they are, which were no smaller coded.

    Args:
        tokens: Covered.
        values: Their frame.
    """

    tokens: int
    values: memoryview


def scan(codes: memoryview) -> list[tuple[int, memoryview]]:
    """Cut codes into records: the tokens of each, and its bytes.

    Raises:
        CodecError: Sizes do not fit, or a record has no tokens (X3).
    """
    found: list[tuple[int, memoryview]] = []
    while codes:
        size = 4 + int.from_bytes(codes[:4], "little")
        tokens = int.from_bytes(codes[4:8], "little")
        if not HEAD <= size <= len(codes) or not tokens:
            raise CodecError(
                f"record {len(found)} of {size} bytes and {tokens} tokens, expected {HEAD} to "
                f"{len(codes)} bytes and a token",
                rule="X3",
                at="codes",
            )
        found.append((tokens, codes[:size]))
        codes = codes[size:]
    return found


def count_channels(data: memoryview, layout: WordLayout) -> int:
    """Return the number of channels of a record, from the size of its first frame.

    Raises:
        CodecError: That is none (X5).
    """
    (first,), _ = frames.split(data[HEAD:], [None])
    tokens, size = int.from_bytes(data[4:8], "little"), frames.content_size(first)
    return size // (tokens * np.dtype(layout.word).itemsize if data[8] == STORED else 2)


def parse(data: memoryview, channels: int, layout: WordLayout) -> Record | StoredRecord:
    """Look through one record; of its frames the first of a coded one alone is decompressed.

    Raises:
        CodecError: A frame is not of the size it must have (X5), groups have a hole (X6),
            something other than zeros follows (X11), or it is of another kind (X12).
    """
    tokens, kind = int.from_bytes(data[4:8], "little"), data[8]
    if kind not in (CODED, STORED):
        raise CodecError(f"a record of kind {kind}, expected 0 or 1", rule="X12", at="codes")
    found: Record | StoredRecord
    if kind == STORED:
        size = tokens * channels * np.dtype(layout.word).itemsize
        (values,), rest = frames.split(data[HEAD:], [size])
        found = StoredRecord(tokens, values)
    else:
        found, rest = _parse_coded(data, channels, layout)
    if bytes(rest).strip(b"\0"):
        raise CodecError("bytes behind the last frame, expected zeros", rule="X11", at="codes")
    return found


def _parse_coded(data: memoryview, channels: int, layout: WordLayout) -> tuple[Record, memoryview]:
    tokens, base = int.from_bytes(data[4:8], "little"), int.from_bytes(data[9:HEAD], "little")
    (first,), rest = frames.split(data[HEAD:], [2 * channels])
    found = load(base, frames.expand(first, 2 * channels))
    coded, rest = frames.split(rest, [tokens * n for n in found.sizes()])
    shapes = layout.plane_shapes(tokens, channels)
    planes, rest = frames.split(rest, [prod(shape) for shape in shapes])
    escapes = None
    if layout.has_escapes:
        (escapes,), rest = frames.split(rest, [None])
    return Record(tokens, found, coded, planes, escapes), rest


def decode(data: memoryview, layout: WordLayout, out: Words) -> None:
    """Fill ``out``, ``(tokens, ...)``, with the values of a record as integers.

    Raises:
        CodecError: As ``parse``; or a frame is damaged (X5), or there are more or fewer
            escapes than symbols that stand for one (X9).
    """
    record = parse(data, out[0].size, layout)
    if isinstance(record, StoredRecord):
        values = _read(record.values, (out.nbytes,)).view(layout.word)
    else:
        values = _decode(record, layout)
    out[:] = values.reshape(out.shape)


def _decode(record: Record, layout: WordLayout) -> Words:
    coded = _read_symbols(record)
    escapes = _read_escapes(record, coded)
    shapes = layout.plane_shapes(*coded.shape)
    low = [_read(f, s) for f, s in zip(record.planes, shapes, strict=True)]
    return merge(coded, escapes, low, record.channels.offsets(layout), layout)


def _read_symbols(record: Record) -> U8:
    """Symbols ``(tokens, channels)``."""
    shapes = [(record.tokens, n) for n in record.channels.sizes()]
    blocks = [_read(f, s) for f, s in zip(record.groups, shapes, strict=True)]
    place = record.channels.place
    if place is None:
        return blocks[0]
    return np.concatenate(blocks, axis=1).take(place, 1, mode="clip")


def _read_escapes(record: Record, coded: U8) -> U16:
    """Heads of the elements whose symbol is 0."""
    if record.escapes is None:
        return np.empty(0, np.uint16)
    count = coded.size - int(np.count_nonzero(coded))
    said = frames.content_size(record.escapes) // 2
    if said != count:
        raise CodecError(
            f"{said} escapes, expected {count}, one for each symbol of 0", rule="X9", at="codes"
        )
    return _read(record.escapes, (2 * count,)).view("<u2")


def _read(frame: memoryview, shape: tuple[int, ...]) -> U8:
    return np.frombuffer(frames.expand(frame, prod(shape)), np.uint8).reshape(shape)
