"""Bodies are bounded in bytes and in values before they are decoded."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkv.serve.body import MAX_BODY, MAX_VALUES, count_values, decode, length
from vkv.serve.request_error import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[{,:é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('b"\\,:'), inner),
)


def values(value: Any) -> int:
    """Count values and keys by walking over them."""
    if isinstance(value, dict):
        return 1 + sum(1 + values(v) for v in value.values())
    return 1 + sum(map(values, value)) if isinstance(value, list) else 1


@given(JSON, st.booleans())
def test_the_count_is_never_below_the_number_of_values(value, ascii_only):
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert values(value) <= count_values(data) <= 2 * values(value) + 1


class Anything(msgspec.Struct):
    a: Any


@pytest.mark.parametrize("piece", [b"[],", b"1,", b"{},", b'"",'])
def test_many_values_are_refused_before_they_are_decoded(piece):
    data = b'{"a":[' + piece * ((MAX_BODY - 20) // len(piece)) + b"0]}"
    start = time.process_time()
    with pytest.raises(RequestError, match=f"at most {MAX_VALUES:,} are read") as refused:
        decode(data, Anything)
    assert refused.value.status == 413
    assert time.process_time() - start < 5


def test_a_long_text_is_one_value():
    text = 'a "quoted", [listed] {text}: \\ ' * 100_000
    assert decode(json.dumps({"a": text}).encode(), Anything).a == text


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":NaN}', b'{"a":1} x'])
def test_what_is_no_json(data):
    with pytest.raises(RequestError, match="the body"):
        decode(data, Anything)


@pytest.mark.parametrize(
    ("text", "status"),
    [(None, 411), ("", 400), ("-1", 400), ("1e3", 400), ("²", 400), ("9" * 5000, 413),
     (str(MAX_BODY + 1), 413)],
)  # fmt: skip
def test_lengths_that_are_refused(text, status):
    with pytest.raises(RequestError) as refused:
        length(text)
    assert refused.value.status == status


def test_lengths():
    assert [length(text) for text in ("0", "007", str(MAX_BODY))] == [0, 7, MAX_BODY]
