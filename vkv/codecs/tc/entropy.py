"""Turn integers to entropy-coded bytes and back, in chunks of rows of like variance.

A chunk is a chunk and one page of pcodec's wrapped format 4.1, in its mode ``Classic``
and without delta encoding; ``spec/v1/codecs/tc.md`` says all of it (rules T11 to T14).
Everything else that pcodec can read is refused before pcodec sees it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

from vkv.errors import CodecError

Ints = npt.NDArray[np.int16] | npt.NDArray[np.int32]

#: Bytes a symbol -> pcodec's name of it.
WIDTHS = {2: "i16", 4: "i32"}
#: A chunk's tables cost .4 bits a symbol at 1,024 symbols, .03 at 16,384.
CHUNK = 1 << 14
#: Most symbols of one chunk, as in pcodec.
MAX_CHUNK = 1 << 24
#: Format 4.1, as pcodec's own header says it.
VERSION = b"\x04\x01"
#: Mode ``Classic`` in the low half of a chunk's first byte, no delta encoding in the high half.
PLAIN = 0
LEVEL = 8
#: Below this many symbols threads cost more than they bring (some 5 and 10 ms of work).
ENCODE_ALONE, DECODE_ALONE = 1 << 18, 1 << 21
MAX_THREADS = 8


def pack(chunks: Sequence[Ints]) -> bytes:
    """Encode every chunk (integers of any shape, in C order): its size, U32, and its bytes."""
    coded = _each(_compress, chunks, sum(c.size for c in chunks) < ENCODE_ALONE)
    return b"".join(len(c).to_bytes(4, "little") + c for c in coded)


def unpack(data: bytes, chunks: Sequence[Ints], at: str) -> None:
    """Fill ``chunks``, flat and contiguous, from what ``pack`` made.

    Raises:
        CodecError: The sizes do not fit (T11), a chunk is not a plain one (T12), or
            not of this many symbols (T13).
    """
    work = list(zip(split(data, len(chunks), at), chunks, strict=True))
    alone = sum(c.size for c in chunks) < DECODE_ALONE
    _each(lambda pair: _decompress(pair[0], pair[1], at), work, alone)


def split(data: bytes, count: int, at: str) -> list[bytes]:
    """Split into the bytes of ``count`` chunks; check their sizes and first bytes (T11, T12)."""
    chunks, start = [], 0
    for i in range(count):
        size = int.from_bytes(data[start : start + 4], "little")
        stop = start + 4 + size
        if start + 4 > len(data) or stop > len(data) or not size:
            raise CodecError(
                f"chunk {i} of {count} has {size} bytes, expected 1 to {len(data) - start - 4}",
                rule="T11",
                at=at,
            )
        if data[start + 4] != PLAIN:
            raise CodecError(
                f"chunk {i} is of mode and delta encoding {data[start + 4]:#x}, expected {PLAIN}",
                rule="T12",
                at=at,
            )
        chunks.append(data[start + 4 : stop])
        start = stop
    if start != len(data):
        raise CodecError(
            f"{len(data) - start} bytes after the last chunk, expected none", rule="T11", at=at
        )
    return chunks


def _compress(chunk: Ints) -> bytes:
    flat = np.ascontiguousarray(chunk).reshape(-1)
    if not 0 < flat.size <= MAX_CHUNK:
        raise CodecError(
            f"{flat.size} symbols in a chunk, expected 1 to {MAX_CHUNK}", rule="T13", at="tc"
        )
    config = ChunkConfig(
        compression_level=LEVEL,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([flat.size]),
    )
    coder = wrapped.FileCompressor().chunk_compressor(flat, config)
    return bytes(coder.write_meta() + coder.write_page(0))


def _decompress(data: bytes, out: Ints, at: str) -> None:
    reader, _ = wrapped.FileDecompressor.new(VERSION)
    try:
        chunk, used = reader.chunk_decompressor(data, WIDTHS[out.itemsize])
        progress, more = chunk.read_page_into(data[used:], out.size, out)
    except RuntimeError as exc:
        raise CodecError(f"pcodec: {exc}", rule="T13", at=at) from None
    if not progress.finished or progress.n_processed != out.size or used + more != len(data):
        raise CodecError(
            f"{used + more} of {len(data)} bytes hold {progress.n_processed} symbols, "
            f"expected all to hold {out.size}",
            rule="T13",
            at=at,
        )


def _each(call: Callable[[Any], Any], items: Sequence[Any], alone: bool) -> list[Any]:
    """Call ``call`` on each item, in this thread or in several (pcodec releases the GIL)."""
    threads = min(len(items), os.cpu_count() or 1, MAX_THREADS)
    if threads < 2 or alone:
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, items))
