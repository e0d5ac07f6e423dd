"""Canonical msgpack, told from the bytes: what passes, and what is refused why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkv.errors import HeaderError
from vkv.format import canonical, limits

ENCODER = msgspec.msgpack.Encoder(order="sorted")
#: One of every form, at both ends of what takes so many bytes.
EDGES = [
    None, True, False, 1.5, float("nan"), 0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32,
    2**64 - 1, -1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63),
    *("x" * n for n in (0, 31, 32, 255, 256, 65535, 65536)), "ä\u2028😀",
    *(b"x" * n for n in (0, 255, 256, 65535, 65536)),
    *([0] * n for n in (0, 15, 16, 65535, 65536)),
    *({f"{i:05}": i for i in range(n)} for n in (0, 15, 16, 65536)), {"": 0, "a": 1, "aa": 2},
]  # fmt: skip
#: Not canonical, and a word of the reason.
REFUSED = {
    b"": "cut", b"\xc1": "0xc1", b"\xca\x40\x40\x00\x00": "0xca", b"\xc7\x00\x05": "0xc7",
    b"\xc8\x00\x00\x05": "0xc8", b"\xc9" + bytes(5): "0xc9", b"\xd6\xff\x00\x00\x00\x01": "0xd6",
    b"\xcc\x7f": "form", b"\xcd\x00\xff": "form", b"\xce\x00\x00\xff\xff": "form",
    b"\xcf\x00\x00\x00\x00\xff\xff\xff\xff": "form", b"\xd0\xe0": "form", b"\xd0\x05": "form",
    b"\xd1\xff\x80": "form", b"\xd1\x7f\xff": "form", b"\xd2\xff\xff\x80\x00": "form",
    b"\xd3\xff\xff\xff\xff\x80\x00\x00\x00": "form", b"\xd3\x7f" + b"\xff" * 7: "form",
    b"\xd9\x1f" + b"x" * 31: "form", b"\xda\x00\xff" + b"x" * 255: "form",
    b"\xc5\x00\xff" + b"x" * 255: "form", b"\xdc\x00\x0f" + bytes(15): "form",
    b"\xdd\x00\x00\xff\xff" + bytes(65535): "form", b"\xde\x00\x01\xa1a\x00": "form",
    b"\x82\xa1b\x00\xa1a\x00": "sorted", b"\x82\xa1a\x00\xa1a\x00": "not unique",
    b"\x82\xa1a\x00\xa1b\x00\x00": "more", b"\x81\x01\x00": "key",
    b"\x81\xc0\x00": "key", b"\x81\xc4\x01a\x00": "key", b"\x81\x91\x01\x00": "key",
    b"\x81\xa1\xff\x00": "UTF-8", b"\xa1\xff": "UTF-8", b"\xa3\xed\xa0\x80": "UTF-8",
    b"\x00\x00": "more", b"\x91": "cut", b"\xa2a": "cut", b"\xcb" + bytes(7): "cut",
    b"\xcd\x01": "cut", b"\xc4\x02a": "cut", b"\x81\xa1a": "cut", b"\x81\xa2a": "cut",
    b"\xdd" + b"\xff" * 4: "cut", b"\xdf" + b"\xff" * 4: "cut", b"\xdb" + b"\xff" * 4: "cut",
    b"\x91" * 65 + b"\xc0": "deeper", b"\x81\xa0" * 65 + b"\xc0": "deeper",
    b"\x91" * 100_000: "deeper",
}  # fmt: skip


@pytest.mark.parametrize("value", EDGES, ids=lambda v: f"{type(v).__name__}-{str(v)[:12]}")
def test_what_an_encoder_makes_is_canonical(value):
    canonical.check(ENCODER.encode([value, {"a": value}]))


@pytest.mark.parametrize("raw", REFUSED, ids=lambda raw: raw[:10].hex())
def test_what_is_refused(raw):
    with pytest.raises(HeaderError) as caught:
        canonical.check(raw)
    assert caught.value.rule == "H1"
    assert REFUSED[raw] in caught.value.message


def test_depth():
    canonical.check(b"\x91" * limits.MAX_NESTED + b"\xc0")
    canonical.check(b"\x91" * limits.MAX_NESTED + b"\x90")  # nothing is in it


NUMBERS = st.floats() | st.integers(-(2**63), 2**64 - 1)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(VALUES, st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 3))
def test_bytes_pass_only_if_encoding_what_they_say_gives_them(value, at, insert, drop):
    raw = ENCODER.encode(value)
    canonical.check(raw)
    at %= len(raw)
    changed = raw[:at] + insert + raw[at + drop :]
    try:
        canonical.check(changed)
    except HeaderError:
        return
    assert ENCODER.encode(msgspec.msgpack.decode(changed)) == changed


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\x81\xa0\xc0", b"\xa1a"])
def test_a_mebibyte_of_the_smallest_values(item):
    count = (1 << 20) // len(item)
    canonical.check(b"\xdd" + count.to_bytes(4, "big") + item * count)
