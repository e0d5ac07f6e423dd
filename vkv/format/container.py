"""Read strict safetensors framing: ranged reads, one layout, limits.

Rules C1 to C10 of ``spec/v1/format.md``. A ``.vkv`` file is a safetensors file::

    u64 little-endian   n, length of the JSON
    n bytes             JSON, padded with spaces so that the data starts at a multiple of 64
    data                ``vkv.header`` first, then tensor after tensor, without holes

This module knows no msgpack and no MLX. The ``safetensors`` library checks whole
files; this exists for what it does not do: ranged reads, fixed layout, limits.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from vkv.errors import ContainerError, HeaderError, NotVkvError
from vkv.format.dtypes import ITEMSIZE
from vkv.format.file_id import FileId, is_file_id, of_header
from vkv.format.framing import FORMAT, HEADER, frame
from vkv.format.limits import MAX_COMMAS, MAX_HEADER, MAX_JSON, MAX_OPEN, MAX_SIZE
from vkv.sources.base import FIRST_READ, Source


@dataclass(frozen=True, slots=True)
class Entry:
    """Locate one tensor of the container; ``start`` and ``stop`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Container:
    """Hold the framing of one file.

    Attributes:
        entries: Tensors by name, in file order; together they cover the data exactly.
        version: Version of the format, as ``__metadata__`` has it.
        id: Id of the file, as ``__metadata__`` has it.
    """

    entries: dict[str, Entry]
    version: str
    id: FileId


def parse(source: Source) -> Container:
    """Read and check the framing of ``source``; reads nothing but the JSON.

    Raises:
        NotVkvError: A safetensors file of another format (C8).
        ContainerError: A broken rule C1 to C8, or C10.
    """
    if source.size < 8:
        raise ContainerError(f"{source.size} bytes, expected at least 8", rule="C1")
    first = source.read(0, min(source.size, FIRST_READ))
    length = int.from_bytes(first[:8], "little")
    if length > MAX_JSON:
        raise _foreign(first)
    base = 8 + length
    if base > source.size:
        raise ContainerError(
            f"JSON header ends at byte {base}, the file at {source.size}", rule="C1"
        )
    if base > len(first):
        first += source.read(len(first), base - len(first))
    table = _parse_json(first[8:base])
    version, file_id = _metadata(table)
    entries = [_entry(name, value, base) for name, value in table.items()]
    covered = _check_cover(sorted(entries, key=lambda e: (e.start, e.stop)), base, source.size)
    container = Container(covered, version, file_id)
    _check_text(container, first[:base])
    return container


#: How files of other formats begin, and their names.
_SIGNATURES = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, as PyTorch and NumPy write",
    b"\x80": "a pickle",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"SQLite format 3": "a SQLite database",
}
#: Bytes that are looked at to tell text.
_TEXT_SIZE = 256


def _foreign(first: bytes) -> ContainerError:
    """Return the error of a file whose first 8 bytes are no length of a JSON header (C2)."""
    known = [name for start, name in _SIGNATURES.items() if first.startswith(start)]
    text = first[:_TEXT_SIZE].decode("utf-8", "replace").rstrip("\ufffd")  # a cut character
    if known:
        return ContainerError(f"not a vkv file: {known[0]}", rule="C2")
    if text and all(c != "\ufffd" and (c.isprintable() or c.isspace()) for c in text):
        return ContainerError("not a vkv file: text", rule="C2")
    length = int.from_bytes(first[:8], "little")
    found = f"a JSON header of {length} bytes, the limit is {MAX_JSON}"
    return ContainerError(f"not a vkv file: it would have {found}", rule="C2")


#: How every file begins (C10), up to the size of its header.
_BEGINNING = re.compile(
    rb'\{"__metadata__":\{"format":"vkv","vkv":"[0-9.]{3,20}","id":"([0-9a-f]{64})"\},'
    rb'"vkv\.header":\{"dtype":"U8","shape":\[([0-9]{1,7})\],'
)
_BEGINNING_SIZE = 256


def peek_id(source: Source) -> FileId | None:
    """Return the id that a file says it has, from its first bytes; ``None`` if it says none."""
    found = _BEGINNING.match(source.read(0, min(source.size, _BEGINNING_SIZE)), 8)
    return FileId(found[1].decode()) if found else None


def has_id(source: Source, file_id: FileId) -> bool:
    """Tell whether the header of a file has this digest. Parses neither JSON nor header."""
    first = source.read(0, min(source.size, _BEGINNING_SIZE))
    found = _BEGINNING.match(first, 8)
    start, nbytes = 8 + int.from_bytes(first[:8], "little"), int(found[2]) if found else 0
    if not found or nbytes > MAX_HEADER or start + nbytes > source.size:
        return False
    return of_header(source.read(start, nbytes)) == file_id


def read_header(source: Source, container: Container) -> bytes:
    """Read the bytes of ``vkv.header`` and compare them with the id of the file.

    Raises:
        HeaderError: Too many bytes (H5).
        ContainerError: Other bytes than were written (C8).
    """
    entry = container.entries[HEADER]
    if entry.nbytes > MAX_HEADER:
        found = f"{entry.nbytes} bytes, the limit is {MAX_HEADER}"
        raise HeaderError(found, rule="H5", at=HEADER)
    raw = source.read(entry.start, entry.nbytes)
    if (actual := of_header(raw)) != container.id:
        raise damaged(f"BLAKE3 {actual[:16]}…, __metadata__ says {container.id[:16]}…")
    return raw


def damaged(found: str, rule: str = "C8", at: str = HEADER) -> ContainerError:
    """Return the error of a file whose JSON or header is not what was written."""
    return ContainerError(f"header damaged: {found}", rule=rule, at=at)


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
    return table


def _metadata(table: dict[str, Any]) -> tuple[str, FileId]:
    """Take ``__metadata__`` out of the table and return its version and id (C8)."""
    values = table.pop("__metadata__", {})
    if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
        raise ContainerError("not a map of text to text", rule="C3", at="__metadata__")
    found = values.get("format")
    if found != FORMAT and HEADER not in table:
        raise NotVkvError(
            f"a safetensors file, but not a vkv file (format is {found!r}); `vkv convert` reads "
            "mlx-lm prompt caches",
            rule="C8",
            at="__metadata__",
        )
    if found != FORMAT:
        raise damaged(f"format is {found!r}, expected {FORMAT!r}", at="__metadata__")
    if values.keys() != {"format", "vkv", "id"}:
        names = ", ".join(sorted(values))
        raise damaged(f"holds {names}, expected format, vkv and id", at="__metadata__")
    if not is_file_id(values["id"]):
        raise damaged(f"id {values['id']!r}, expected 64 hex digits", at="__metadata__")
    return values["vkv"], values["id"]


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


def _check_text(container: Container, found: bytes) -> None:
    """Refuse any other text than the one that writers make of the same content (C10)."""
    forms = [(e.name, e.dtype, e.shape) for e in container.entries.values()]
    expected = frame(container.version, container.id, forms)
    if found == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), 0)
    raise damaged(
        f"JSON of {len(found) - 8} bytes, expected one of {len(expected) - 8}, without spaces but "
        f"at the end, in the order of the data; the first difference is at byte {at}",
        rule="C10",
        at="JSON header",
    )
