"""Any bytes and any structure: read, or refused by rule. Nothing else comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.test_header import DIGEST, pack, plain, sample
from vkv.errors import ContainerError, VkvError
from vkv.format import container, dtypes, header
from vkv.format.container import Entry
from vkv.format.schema import Header, Layer, Rope
from vkv.sources.memory import BytesSource

pytestmark = pytest.mark.hostile

METADATA = {"format": "vkv", "vkv": "1.0", "id": "0" * 64}


def framed(table: dict[str, Any], escape: bool = True) -> bytes:
    """The length and JSON of a table as writers make them."""
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=escape)
    raw = text.encode(errors="surrogatepass")
    raw += b" " * (-(8 + len(raw)) % 64)
    return len(raw).to_bytes(8, "little") + raw


SEED: dict[str, Any] = {
    "__metadata__": METADATA,
    "vkv.header": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "x": {"dtype": "F16", "shape": [1, 2], "data_offsets": [4, 8]},
}
FILE = framed(SEED) + bytes(8)


def parsed(data: bytes) -> dict[str, Entry] | ContainerError:
    try:
        return container.parse(BytesSource(data)).entries
    except ContainerError as exc:
        return exc


def check(data: bytes) -> dict[str, Entry]:
    """The entries, which the Rust library then finds too; none if refused by a rule."""
    found = parsed(data)
    if isinstance(found, ContainerError):
        assert found.rule in {f"C{i}" for i in range(1, 11)}
        assert str(found).encode()  # it can be printed, whatever stood in the file
        return {}
    assert {n for n, _ in safetensors.deserialize(data)} == found.keys()
    return found


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(FILE)), st.binary(max_size=8), st.integers(0, 8))
def test_changed_framing_raises_only_container_errors(at, insert, drop):
    """Whatever the bytes, a reader MUST refuse by rule or read; the Rust library reads it too."""
    check(FILE[:at] + insert + FILE[at + drop :])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["U8", "F16", "dtype", "shape"]),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=8,
)  # fmt: skip
SIZES = st.lists(st.integers(-1, 5) | st.integers() | JSON, max_size=9)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*dtypes.ITEMSIZE]) | JSON, "shape": SIZES | JSON,
     "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 9)) | SIZES | JSON}
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3),
    ENTRY | JSON,
    st.integers(0, 40),
    st.booleans(),
)
def test_any_json_raises_only_container_errors(table, header, size, escape):
    """Tables of any shape MUST be read or refused by rule."""
    full = {"__metadata__": METADATA, "vkv.header": header, **table}
    data = framed(full, escape) + bytes(size)
    if entries := check(data):
        assert sum(e.nbytes for e in entries.values()) == size


HEADER = header.dump(sample(metadata={"a": "b"}))


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, len(HEADER)), st.binary(max_size=8), st.integers(0, 8))
def test_changed_header_raises_only_vkv_errors(at, insert, drop):
    """Whatever the bytes, a reader MUST refuse them by rule or read them."""
    loads(HEADER[:at] + insert + HEADER[at + drop :])


def loads(raw: bytes) -> None:
    found = loaded(raw)
    if isinstance(found, VkvError):
        assert found.rule in {f"H{i}" for i in range(1, 11)}
        assert str(found).encode()  # it can be printed, whatever stood in the file
    else:
        assert header.load(header.dump(found)) is not None


def loaded(raw: bytes) -> Header | VkvError:
    try:
        return header.load(raw)
    except VkvError as exc:
        return exc


INTEGERS = st.integers(-(2**63), 2**64 - 1)
WORDS = st.sampled_from(["k", "F16", "table", "rope", 0, 1, 3, DIGEST])
TEXTS = st.text(max_size=3) | st.binary(max_size=3)
ATOM = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS | WORDS
VALUE = st.recursive(
    ATOM, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a nested value."""
    keys = value if isinstance(value, dict) else range(len(value))
    found = []
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


@settings(max_examples=500, deadline=None)
@given(st.data(), VALUE, st.booleans())
def test_changed_structure_raises_only_vkv_errors(data, value, drop):
    """Any value in any place MUST be read or refused by rule."""
    layer = Layer(kind="list", children=sample().layers)
    head = plain(sample(layers=(layer,), ropes=(Rope(dims=4, base=1e4),)))
    place, key = data.draw(st.sampled_from(places(head)))
    if drop:
        del place[key]
    else:
        place[key] = value
    loads(pack(head))
