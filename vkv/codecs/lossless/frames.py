"""Write and read Zstandard frames of known size, preceded by their length.

A frame says the size of its content, uses no dictionary and no window above 8 MiB; so
what a reader will be asked for is known before it decompresses anything (rule X5).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from vkv.errors import CodecError

__all__ = ["compress", "expand", "split"]

Buffer = bytes | memoryview
#: Entropy-coded literals and a quick search for repeated tokens. Higher levels search longer
#: and find nothing: measured in ``spec/decisions/0014-lossless-entropy-coder.md``.
LEVEL = 1
#: 8 MiB, what RFC 8878 recommends that every decoder takes.
WINDOW_LOG = 23
OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG}


def compress(content: Buffer) -> bytes:
    """Return the length of a frame, U32, and the frame of ``content``."""
    frame = zstd.compress(content, LEVEL)
    return len(frame).to_bytes(4, "little") + frame


def split(data: memoryview, sizes: Sequence[int | None]) -> tuple[list[memoryview], memoryview]:
    """Cut frames off the front of ``data`` and check what they say of themselves.

    Args:
        data: Frames one after another, and what comes after them.
        sizes: Bytes of content that each frame must have; ``None`` for any even number.

    Returns:
        The frames, and what comes after them.

    Raises:
        CodecError: A frame ends behind ``data``, or its content has another size (X5).
    """
    found = []
    for size in sizes:
        length = int.from_bytes(data[:4], "little")
        if len(data) < 4 or not 0 < length <= len(data) - 4:
            raise _broken(f"a frame of {length} bytes, expected 1 to {max(len(data) - 4, 0)}")
        frame = data[4 : 4 + length]
        said = content_size(frame)
        if said != size and (size is not None or said % 2):
            raise _broken(
                f"a frame of {said} bytes of content, expected {size or 'an even number'}"
            )
        found.append(frame)
        data = data[4 + length :]
    return found, data


def content_size(frame: Buffer) -> int:
    """Return how many bytes a frame says it holds.

    Raises:
        CodecError: It is no frame, does not say it, uses a dictionary, or asks for a window
            of more than 8 MiB (X5).
    """
    try:
        info = zstd.get_frame_info(frame)
    except zstd.ZstdError as exc:
        raise _broken(f"no Zstandard frame ({exc})") from None
    if info.decompressed_size is None or info.dictionary_id:
        raise _broken("a frame without size or with a dictionary, expected a size and none")
    if (window := _window(frame, info.decompressed_size)) > 1 << WINDOW_LOG:
        raise _broken(f"a frame with a window of {window} bytes, expected at most 8 MiB")
    return info.decompressed_size


def _window(frame: Buffer, size: int) -> int:
    """Bytes that are to be remembered: a frame of one segment says its size alone (RFC 8878)."""
    descriptor, window = frame[4], frame[5]
    return size if descriptor & 0x20 else (8 + (window & 7)) << (7 + (window >> 3))


def expand(frame: Buffer, size: int) -> bytes:
    """Decompress one frame whose content has ``size`` bytes.

    Raises:
        CodecError: It is damaged, or is not one frame of that size (X5).
    """
    reader = zstd.ZstdDecompressor(options=OPTIONS)
    try:
        content = reader.decompress(frame, max_length=size)
    except zstd.ZstdError as exc:
        raise _broken(f"a damaged Zstandard frame ({exc})") from None
    if len(content) != size or not reader.eof or reader.unused_data:
        raise _broken(f"{len(content)} bytes of content, expected one frame of {size}")
    return content


def _broken(found: str) -> CodecError:
    return CodecError(f"found {found}", rule="X5", at="codes")
