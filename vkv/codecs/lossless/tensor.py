"""Write a tensor as records, read it, cut it and join it.

Tokens are the rows of a tensor, all other axes together its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from vkv.codecs.lossless import record_writer, records
from vkv.codecs.lossless.planes import WordLayout, Words
from vkv.codecs.threads import in_threads
from vkv.errors import CodecError
from vkv.format.limits import MAX_EXPANSION

#: Fewer elements in a record cost more in tables than a shorter one is worth.
MIN_ELEMENTS = 1 << 18
#: Below this many elements threads cost more than they bring (some 2 ms of work).
ALONE = 1 << 19

Bytes = bytes | memoryview
#: Tokens of a record, and its bytes.
CutOut = tuple[int, memoryview]


@dataclass(frozen=True, slots=True)
class Settings:
    """Say how a tensor is written.

    Args:
        layout: Of its dtype.
        record: Tokens of a record; more where a token has few channels.
        groups: Groups of channels at most.
    """

    layout: WordLayout
    record: int
    groups: int

    def tokens(self, channels: int) -> int:
        """Return the tokens of a full record."""
        return max(self.record, -(-MIN_ELEMENTS // channels))


def count_tokens(shape: tuple[int, ...]) -> int:
    """Return the number of tokens of a shape: axis -2; one where there is only one axis."""
    return shape[-2] if len(shape) > 1 else 1


def write(values: Words, settings: Settings) -> list[bytes]:
    """Return the records of an array of any shape."""
    return _write(_by_token(values), settings)


def _write(values: Words, settings: Settings) -> list[bytes]:
    """Return the records of ``(tokens, ...)``."""
    step = settings.tokens(values[0].size)
    work = [
        (values[a : a + step], settings.layout, settings.groups)
        for a in range(0, len(values), step)
    ]
    return in_threads(record_writer.encode, work, alone=values.size < ALONE)


def scan(codes: memoryview, shape: tuple[int, ...]) -> list[CutOut]:
    """Return tokens and bytes of each record of a tensor.

    Raises:
        CodecError: More elements than the bytes can stand for (X4), or other records than
            the shape asks for (X3).
    """
    if prod(shape) > MAX_EXPANSION * len(codes):
        raise CodecError(
            f"{prod(shape)} elements in {len(codes)} bytes, expected at most "
            f"{MAX_EXPANSION} a byte",
            rule="X4",
            at="codes",
        )
    found = records.scan(codes)
    tokens, total = count_tokens(shape), sum(count for count, _ in found)
    if total != tokens:
        raise CodecError(f"records of {total} tokens, expected {tokens}", rule="X3", at="codes")
    return found


def read(codes: memoryview, shape: tuple[int, ...], layout: WordLayout) -> Words:
    """Return the values of a tensor as integers.

    Raises:
        CodecError: As ``scan``, or a record is broken (X5 on).
    """
    out = np.empty(shape, layout.word)
    _fill(scan(codes, shape), _by_token(out), layout)
    return out


def cut(codes: memoryview, shape: tuple[int, ...], tokens: int, settings: Settings) -> list[Bytes]:
    """Return records of the first tokens; the one that is cut through is coded anew.

    Raises:
        CodecError: The codes are broken.
    """
    kept: list[Bytes] = []
    for count, data in records.scan(codes):
        if tokens < count:
            channels = prod(shape) // count_tokens(shape)
            values = _values([(count, data)], channels, settings.layout)[:tokens]
            return [*kept, *(_write(values, settings) if tokens else [])]
        kept.append(data)
        tokens -= count
    return kept


def join(pieces: Sequence[memoryview], settings: Settings) -> list[Bytes]:
    """Return the records of consecutive tensors; neighbours that fit in one are made one.

    A cache that is saved after every answer has many short records, and each costs tables.

    Raises:
        CodecError: The codes are broken.
    """
    found = [record for piece in pieces for record in records.scan(piece)]
    channels = records.count_channels(found[0][1], settings.layout)
    joined: list[Bytes] = []
    for run in _runs(found, settings.tokens(channels)):
        if len(run) == 1:
            joined.append(run[0][1])
        else:
            joined += _write(_values(run, channels, settings.layout), settings)
    return joined


def _runs(found: list[CutOut], most: int) -> list[list[CutOut]]:
    """Neighbouring records that have at most ``most`` tokens together."""
    runs: list[list[CutOut]] = []
    for tokens, data in found:
        if runs and sum(count for count, _ in runs[-1]) + tokens <= most:
            runs[-1].append((tokens, data))
        else:
            runs.append([(tokens, data)])
    return runs


def _values(run: list[CutOut], channels: int, layout: WordLayout) -> Words:
    """Values of neighbouring records, ``(tokens, channels)``."""
    out = np.empty((sum(count for count, _ in run), channels), layout.word)
    _fill(run, out, layout)
    return out


def _fill(found: list[CutOut], out: Words, layout: WordLayout) -> None:
    """Decode records into ``out``, ``(tokens, ...)``."""
    work, row = [], 0
    for tokens, data in found:
        work.append((data, layout, out[row : row + tokens]))
        row += tokens
    in_threads(records.decode, work, alone=out.size < ALONE)


def _by_token(values: Words) -> Words:
    """Return a view of an array with its tokens first, ``(tokens, ...)``."""
    return np.moveaxis(values, -2, 0) if values.ndim > 1 else values[None]
