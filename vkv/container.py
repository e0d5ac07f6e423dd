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
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from blake3 import blake3

from vkv.errors import ContainerError
from vkv.header import ALIGN, ITEMSIZE

HEADER = "vkv.header"
METADATA = {"format": "vkv", "vkv": "1.0"}
#: 10,000 tensors of 200 bytes each fit.
MAX_JSON = 1 << 21
#: ``{`` and ``[``, and commas, so that it stays small when it is parsed: an empty list takes 2
#: bytes and 64. A tensor takes 3 and some 8 of them.
MAX_OPEN, MAX_COMMAS = 1 << 16, 1 << 17
#: Sizes above 2^48 bytes are no file; sums of them still fit 64 bits.
MAX_SIZE = (1 << 48) - 1
#: Bytes asked for at once when a file is opened: enough for JSON and header of most.
FIRST_READ = 1 << 16
CHUNK = 1 << 24

Buffer = bytes | bytearray | memoryview


class Pieces(Protocol):
    """Bytes that come piece by piece, in whichever thread goes through them."""

    nbytes: int

    def __iter__(self) -> Iterator[memoryview]: ...


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


class Source(Protocol):
    """Bytes that can be read by range: a file, or an object behind a URL."""

    size: int

    def read(self, start: int, size: int) -> bytes: ...

    def readinto(self, start: int, buffer: memoryview) -> None: ...

    def close(self) -> None: ...


class FileSource:
    """A local file, held open, so that replacing its name does not change what is read.

    Args:
        path: A path, or the descriptor of an open file, which is left open.

    Raises:
        ContainerError: Not a regular file, or shorter than a range asked for (C1).
    """

    def __init__(self, path: str | os.PathLike[str] | int):
        self.path = f"<descriptor {path}>" if isinstance(path, int) else os.fspath(path)
        target = os.dup(path) if isinstance(path, int) else path
        self._file = open(target, "rb", buffering=0, opener=_open)  # noqa: SIM115  # see close()
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self._file.close()
            raise ContainerError("not a regular file", rule="C1", at=self.path)
        self.size = found.st_size

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.readinto(start, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                n = os.preadv(self._file.fileno(), [buffer[done : done + CHUNK]], start + done)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, self.path) from exc
            if n == 0:
                raise ContainerError(
                    f"ends at byte {start + done}, expected {start + len(buffer)}",
                    rule="C1",
                    at=self.path,
                )
            done += n

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if file := getattr(self, "_file", None):
            file.close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would wait for one


class BytesSource:
    """The same over bytes in memory."""

    def __init__(self, data: Buffer):
        self._data = memoryview(data).cast("B")
        self.size = len(self._data)

    def read(self, start: int, size: int) -> bytes:
        if start + size > self.size:
            raise ContainerError(f"ends at byte {self.size}, expected {start + size}", rule="C1")
        return bytes(self._data[start : start + size])

    def readinto(self, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read(start, len(buffer))

    def close(self) -> None:
        self._data.release()


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


def digest(data: Buffer, threads: int = 1) -> bytes:
    """BLAKE3 of ``data``, 32 bytes."""
    return blake3(data, max_threads=threads).digest()


Form = tuple[str, str, tuple[int, ...]]


def frame(forms: Iterable[Form]) -> bytes:
    """The length and JSON of a container holding tensors ``(name, dtype, shape)`` in this order."""
    table: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for name, dtype, shape in forms:
        stop = at + prod(shape) * ITEMSIZE[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_JSON:
        raise ContainerError(
            f"JSON header of {len(text)} bytes, the limit is {MAX_JSON}", rule="C2"
        )
    return len(text).to_bytes(8, "little") + text


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """``pwrite`` until all is written; the kernel takes at most 2 GiB a call."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + CHUNK], offset + done)


#: Tensors in flight between the thread that makes them and those that hash and write. A GPU's
#: memory reaches the host page by page, so many threads must ask for it at once.
IN_FLIGHT = max(4, min(16, os.cpu_count() or 1))


def write(
    fd: int,
    tensors: list[tuple[Form, Callable[[], Buffer | Pieces]]],
    header: Callable[[list[bytes]], bytes],
) -> None:
    """Write a whole container to an empty file.

    Hashing and writing run in threads beside ``load``; at most ``IN_FLIGHT`` tensors
    are held at a time.

    Args:
        fd: Descriptor open for writing.
        tensors: Name, dtype and shape of each tensor after the header, and a call
            that returns its bytes; called once, in order, in the calling thread.
        header: Given the digests of the tensors, the bytes of ``vkv.header``. Called
            first with zeros, to learn the length, which must not depend on them.

    Raises:
        ContainerError: A tensor has another size than its form (C5), or the table
            is too large (C2).
        OSError: The file cannot be written.
    """
    blank = header([bytes(32)] * len(tensors))
    head = frame([(HEADER, "U8", (len(blank),)), *(form for form, _ in tensors)])
    at = len(head) + len(blank)
    digests: list[Future[bytes]] = []
    with ThreadPoolExecutor(min(IN_FLIGHT, os.cpu_count() or 1), "vkv-write") as pool:
        for i, ((name, dtype, shape), load) in enumerate(tensors):
            if i >= IN_FLIGHT:
                digests[i - IN_FLIGHT].result()
            data = pieces(load())
            expected = prod(shape) * ITEMSIZE[dtype]
            if data.nbytes != expected:
                raise ContainerError(
                    f"{data.nbytes} bytes, expected {expected}", rule="C5", at=name
                )
            digests.append(pool.submit(_put, fd, data, at))
            at += data.nbytes
            del data
    full = header([future.result() for future in digests])
    if len(full) != len(blank):
        raise ContainerError("header changed its length with the digests", rule="C7", at=HEADER)
    write_all(fd, head + full, 0)


def pieces(data: Buffer | Pieces) -> Pieces:
    """``data``, if it comes in pieces, or a buffer as its only one."""
    return _Whole(data) if isinstance(data, Buffer) else data


class _Whole:
    """A buffer as its only piece."""

    def __init__(self, data: Buffer):
        self._data = memoryview(data).cast("B")
        self.nbytes = len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        yield self._data


def _put(fd: int, data: Pieces, offset: int) -> bytes:
    state = blake3()
    for piece in data:
        write_all(fd, piece, offset)
        state.update(piece)
        offset += len(piece)
    return state.digest()
