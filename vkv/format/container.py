"""Strict safetensors framing: ranged reads, deterministic layout, digests, limits.

Rules C1 to C9 of ``spec/v1/format.md``. A ``.vkv`` file is a safetensors file::

    u64 little-endian   n, length of the JSON
    n bytes             JSON, padded with spaces so that the data starts at a multiple of 64
    data                ``vkv.header`` first, then tensor after tensor, without holes

This module knows no msgpack and no MLX. The ``safetensors`` library checks whole
files; this exists for what it does not do: ranged reads, fixed layout, limits.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from vkv.errors import ContainerError
from vkv.format.dtypes import ITEMSIZE
from vkv.format.limits import MAX_COMMAS, MAX_JSON, MAX_OPEN, MAX_SIZE
from vkv.sources.base import FIRST_READ, Source

HEADER = "vkv.header"
METADATA = {"format": "vkv", "vkv": "1.0"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the container; ``start`` and ``stop`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parse(source: Source) -> dict[str, Entry]:
    """Read and check the framing of ``source``; reads nothing but the JSON header.

    Returns:
        The entries by name, in file order. Together they cover the data exactly.

    Raises:
        ContainerError: A broken rule C1 to C8.
    """
    if source.size < 8:
        raise ContainerError(f"{source.size} bytes, expected at least 8", rule="C1")
    first = source.read(0, min(source.size, FIRST_READ))
    length = int.from_bytes(first[:8], "little")
    if length > MAX_JSON:
        raise ContainerError(
            f"JSON header of {length} bytes, the limit is {MAX_JSON}; is this a safetensors file?",
            rule="C2",
        )
    if 8 + length > source.size:
        raise ContainerError(
            f"JSON header ends at byte {8 + length}, the file at {source.size}", rule="C1"
        )
    if 8 + length > len(first):
        first += source.read(len(first), 8 + length - len(first))
    table = _parse_json(first[8 : 8 + length])
    entries = [_entry(name, value, 8 + length) for name, value in table.items()]
    return _check_cover(sorted(entries, key=lambda e: (e.start, e.stop)), 8 + length, source.size)


def _parse_json(raw: bytes) -> dict[str, Any]:
    opened, commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    if opened > MAX_OPEN or commas > MAX_COMMAS:
        raise ContainerError(
            f"JSON header of {opened} braces and brackets and {commas} commas, the limits are "
            f"{MAX_OPEN} and {MAX_COMMAS}",
            rule="C2",
        )
    try:
        text = raw.decode()
        table = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole
        )
        if "\\" in text:  # an escape can stand for half a character, which no UTF-8 has
            json.dumps(table, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ContainerError("JSON header is not UTF-8", rule="C3") from None
    except (ValueError, RecursionError) as exc:
        raise ContainerError(f"JSON header: {exc}", rule="C3") from None
    if not isinstance(table, dict) or not text.startswith("{"):
        raise ContainerError("JSON header does not start with an object", rule="C3")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ContainerError("not a map of text to text", rule="C3", at="__metadata__")
    if metadata.get("format") != "vkv":
        raise ContainerError(
            "a safetensors file, but not a vkv file (format is "
            f"{metadata.get('format')!r}); `vkv convert` reads mlx-lm prompt caches",
            rule="C8",
            at="__metadata__",
        )
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ContainerError(f"{twice!r} stands twice", rule="C3")
    return table


def _no_constant(text: str) -> None:
    raise ContainerError(f"{text} is not JSON", rule="C3")


def _whole(text: str) -> int:
    if text.startswith("-"):  # -0 too, which other readers refuse
        raise ContainerError(f"{text[:20]}, expected no number below 0", rule="C3")
    return int(text)


def _entry(name: str, value: Any, base: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ContainerError("expected exactly dtype, shape and data_offsets", rule="C3", at=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ContainerError(f"unknown dtype {dtype!r}", rule="C3", at=name)
    if not _sizes(shape) or len(shape) > 8 or not _sizes(offsets) or len(offsets) != 2:
        raise ContainerError(
            "shape and data_offsets must be lists of whole numbers from 0 to 2^48 - 1",
            rule="C3",
            at=name,
        )
    if prod(filter(None, shape)) > MAX_SIZE:
        raise ContainerError(
            f"shape {shape}, expected sizes below 2^48 together", rule="C3", at=name
        )
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise ContainerError(
            f"data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes, {dtype} {shape} "
            f"takes {nbytes}",
            rule="C5",
            at=name,
        )
    return Entry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)


def _check_cover(entries: list[Entry], base: int, size: int) -> dict[str, Entry]:
    at = base
    for entry in entries:
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else "leaves a hole"
            raise ContainerError(
                f"{what}: starts at byte {entry.start}, expected {at}", rule="C4", at=entry.name
            )
        at = entry.stop
    if at != size:
        what = "trailing bytes" if at < size else "the file is cut short"
        raise ContainerError(f"{what}: data ends at byte {at}, the file at {size}", rule="C6")
    if not entries or entries[0].name != HEADER:
        first = entries[0].name if entries else None
        raise ContainerError(f"first tensor is {first!r}, expected {HEADER!r}", rule="C7")
    if entries[0].dtype != "U8" or len(entries[0].shape) != 1:
        raise ContainerError("must be a U8 vector", rule="C7", at=HEADER)
    return {entry.name: entry for entry in entries}
