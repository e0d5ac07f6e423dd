"""No bit of a file is free: each one, flipped, is refused by all that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vkv
from vkv.codecs.registry import CODECS
from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.layers import segments

GOOD = Path(__file__).parents[2] / "fixtures" / "v1" / "good"
#: A small file of each codec, and files whose JSON or header has what those lack.
FILES = {
    "raw": "raw-list",
    "affine": "affine-2bit-group32-f16",
    "nsnquant": "nsnquant-1bit",
    "kvquant": "kvquant-token",
    "tc": "tc-joint",
    "identity": "raw-identity",
    "empty": "raw-kv-empty",
    "table": "table-shared",
    "lossless": "lossless-by-hand",
}
#: Fast tests flip one bit in so many, a prime.
STEP = 211


def data_start(raw: bytes) -> int:
    """Where the bytes after the header begin."""
    with open_document(raw) as document:
        return document.entries["vkv.header"].stop


def flipped(raw: bytes, step: int, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    for bit in range(8 * start, 8 * (len(raw) if stop is None else stop), step):
        changed = bytearray(raw)
        changed[bit >> 3] ^= 1 << (bit & 7)
        yield bytes(changed)


def refusal(use: Callable[..., Any], *args: Any, **options: Any) -> VkvError | None:
    try:
        use(*args, **options)
    except VkvError as exc:
        return exc
    return None


def check(path: Path, step: int) -> int:
    """Load the file with single bits flipped, use each also in one other way; return how many."""
    raw, case, dst = path.read_bytes(), path.with_name("case.vkv"), path.with_name("out.vkv")
    # By turns: 3 divides neither 8 nor STEP, so each way meets each bit of a byte.
    others = [
        lambda: not vkv.validate(case).ok,
        lambda: refusal(vkv.convert, case, dst),
        lambda: refusal(vkv.convert, case, dst, inline=True),
    ]
    count = 0
    for count, data in enumerate(flipped(raw, step), 1):  # counted after the loop
        case.write_bytes(data)
        assert refusal(vkv.load, case), count
        assert others[count % 3](), count
        assert not dst.exists()
    return count


def test_every_codec_has_a_file():
    codecs = set()
    for name in FILES.values():
        with open_document(GOOD / f"{name}.vkv") as document:
            codecs |= {(s.codec, s.version) for *_, s in segments(document.header)}
    assert codecs == CODECS.keys()


each_file = pytest.mark.parametrize("name", FILES.values(), ids=FILES.keys())
#: Fast tests flip some bits, slow ones all.
each_step = pytest.mark.parametrize(
    "step", [STEP, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)


@each_step
@each_file
def test_inspect_refuses_every_bit_of_framing_and_header(name, step):
    raw = (GOOD / f"{name}.vkv").read_bytes()
    rules = set()
    for data in flipped(raw, step, stop=data_start(raw)):
        error = refusal(open_document, data)
        assert error is not None
        rules.add(error.rule)
    assert rules <= {"C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C10", "H6"}


@each_step
@each_file
def test_damage_to_the_header_says_so(name, step):
    raw = (GOOD / f"{name}.vkv").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for data in flipped(raw, step, start, data_start(raw)):
        error = refusal(open_document, data)
        assert error is not None
        assert error.rule == "C8"
        assert "header damaged: " in str(error)


@each_step
@each_file
def test_nothing_uses_a_file_with_a_flipped_bit(name, step, tmp_path):
    path = tmp_path / "a.vkv"
    path.write_bytes((GOOD / f"{name}.vkv").read_bytes())
    assert check(path, step) == -(-8 * path.stat().st_size // step)


def test_every_bit_of_the_smallest_file(tmp_path):
    path = tmp_path / "a.vkv"
    path.write_bytes((GOOD / "raw-kv-empty.vkv").read_bytes())
    assert check(path, 1) == 8 * path.stat().st_size
