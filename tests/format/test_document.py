"""Container and header together: what each says of the other, digests, limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vkv.errors import DigestError, HeaderError, VkvError
from vkv.format import container_write, framing, header
from vkv.format.document import Document, open_document
from vkv.format.framing import Form
from vkv.format.limits import FREE_ELEMENTS, MAX_EXPANSION
from vkv.format.schema import Header, Layer, Segment, Stored, Tensor, Tokens
from vkv.sources.memory import BytesSource

#: Name to role, dtype, shape and bytes.
Store = dict[str, tuple[str, str, tuple[int, ...], bytes]]


def build(path: Path, store: Store, layers: tuple[Layer, ...], **fields: Any) -> bytes:
    """Write a file that is right, whatever its codecs mean."""
    forms: list[Form] = [(name, dtype, shape) for name, (_, dtype, shape, _) in store.items()]
    loads = [(form, lambda n=form[0]: store[n][3]) for form in forms]

    def head(digests: list[bytes]) -> bytes:
        tensors = {
            name: Stored(role=role, dtype=dtype, shape=shape, digest=digest)
            for (name, (role, dtype, shape, _)), digest in zip(store.items(), digests, strict=True)
        }
        full = Header(version="1.0", producer="test", layers=layers, tensors=tensors, **fields)
        return header.dump(full)

    with path.open("wb") as out:
        container_write.write(out.fileno(), loads, head)
    return path.read_bytes()


def one(shape: tuple[int, ...], *parts: str, tokens: tuple[int, ...] | None = None) -> Layer:
    """A layer with one tensor, of a codec that nobody knows; ``parts`` in every segment."""
    runs = tuple(
        Segment(codec="sparse", version=1, tokens=n, parts={p: p for p in parts})
        for n in tokens or (None,)
    )
    return Layer(kind="kv", tensors={"keys": Tensor(dtype="F16", shape=shape, segments=runs)})


STORE: Store = {"a": ("payload", "U8", (8,), bytes(range(8)))}


def test_path_and_bytes_give_the_same(tmp_path):
    data = build(tmp_path / "a.vkv", STORE, (one((2, 4), "a"),))
    with open_document(tmp_path / "a.vkv") as file, open_document(data) as memory:
        assert file.header == memory.header
        assert file.size == memory.size == len(data)
        entry = file.entries[framing.HEADER]
        assert file.id == memory.id == container_write.digest(data[entry.start : entry.stop]).hex()
        assert file.read("a") == memory.read("a") == bytes(range(8))
        assert file.name == str(tmp_path / "a.vkv")


def test_id_covers_every_byte(tmp_path):
    base = build(tmp_path / "a.vkv", STORE, (one((2, 4), "a"),))
    with open_document(base) as document:
        known = document.id
    others: list[dict[str, Any]] = [
        {"store": {"a": ("payload", "U8", (8,), bytes(8))}},
        {"store": {"a": ("residual", "U8", (8,), bytes(range(8)))}},
        {"layers": (one((4, 2), "a"),)},
        {"metadata": {"a": "b"}},
    ]
    for change in others:
        data = build(tmp_path / "b.vkv", **{"store": STORE, "layers": (one((2, 4), "a"),)} | change)
        with open_document(data) as document:
            assert document.id != known


def test_changed_bytes_are_found_where_they_are(tmp_path):
    build(tmp_path / "a.vkv", STORE, (one((2, 4), "a"),))
    with (tmp_path / "a.vkv").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    with open_document(tmp_path / "a.vkv") as document:
        with pytest.raises(DigestError, match="the bytes changed") as caught:
            document.read("a")
        assert caught.value.rule == "D1"
        assert caught.value.at == "a"


def test_token_ids(tmp_path):
    ids = [0, 1, 49151, 2**32 - 1]
    raw = b"".join(n.to_bytes(4, "little") for n in ids)
    for count in (4, 0):
        data = raw[: 4 * count]
        tokens = Tokens(count=count, digest=container_write.digest(data), tensor="ids")
        store: Store = {"ids": ("tokens", "U32", (count,), data)}
        build(tmp_path / "a.vkv", store, (), tokens=tokens)
        with open_document(tmp_path / "a.vkv") as document:
            assert document.tokens() == ids[:count]
    build(tmp_path / "a.vkv", {}, ())
    with open_document(tmp_path / "a.vkv") as document:
        assert document.tokens() is None


@pytest.mark.parametrize(
    ("store", "error"),
    [
        ({}, "only the header has it"),
        (STORE | {"b": STORE["a"]}, "only the container has it"),
        ({"a": ("payload", "I8", (8,), bytes(8))}, r"I8 \(8,\) in the container, U8 \(8,\)"),
        ({"a": ("payload", "U8", (2, 4), bytes(8))}, r"U8 \(2, 4\) in the container"),
    ],
)
def test_container_and_header_must_agree(tmp_path, store, error):
    build(tmp_path / "a.vkv", STORE, (one((2, 4), "a"),))
    with open_document(tmp_path / "a.vkv") as document:
        raw = header.dump(document.header)
    forms: list[Form] = [(name, dtype, shape) for name, (_, dtype, shape, _) in store.items()]
    loads = [(form, lambda n=form[0]: store[n][3]) for form in forms]
    with (tmp_path / "b.vkv").open("wb") as out:
        container_write.write(out.fileno(), loads, lambda digests: raw)
    with pytest.raises(HeaderError, match=error) as caught:
        open_document(tmp_path / "b.vkv")
    assert caught.value.rule == "H6"


LIMIT = MAX_EXPANSION * 8 + FREE_ELEMENTS
TABLE: Store = {"t": ("table", "U8", (4096,), bytes(4096))}
MANY: Store = {n: ("payload", "U8", (8,), bytes(8)) for n in "abcd"}


@pytest.mark.parametrize(
    ("store", "layers", "ok"),
    [
        (STORE, (one((1, LIMIT), "a"),), True),
        (STORE, (one((1, LIMIT + 1), "a"),), False),
        (STORE, (one(((1 << 31) - 1,) * 8, "a"),), False),
        (STORE, (one((1 << 30, 0), "a"),), True),
        (STORE | TABLE, (one((1, LIMIT + 1), "a", "t"),), False),
        (TABLE, (one((4, FREE_ELEMENTS // 8), "t", tokens=(1,) * 4),), True),
        (TABLE, (one((4, FREE_ELEMENTS // 4 + 1), "t", tokens=(1,) * 4),), False),
        (MANY, tuple(one((1, MAX_EXPANSION * 8), n) for n in MANY), True),
        (MANY, tuple(one((1, LIMIT), n) for n in MANY), False),
    ],
)
def test_bytes_stand_for_so_many_elements_and_no_more(tmp_path, store, layers, ok):
    """A table is shared, so it counts for nothing; what is free counts once a file."""
    build(tmp_path / "a.vkv", store, layers)
    if ok:
        open_document(tmp_path / "a.vkv").close()
    else:
        with pytest.raises(HeaderError, match="the limit is 64 a byte") as caught:
            open_document(tmp_path / "a.vkv")
        assert caught.value.rule == "H10"


def test_refused_files_are_closed(tmp_path):
    (tmp_path / "a.vkv").write_bytes(b"not a cache, but long enough")
    before = os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []
    for _ in range(20):
        with pytest.raises(VkvError):
            open_document(tmp_path / "a.vkv")
    after = os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []
    assert len(after) <= len(before)


class Watched(BytesSource):
    """Says whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_source_is_closed_with_the_document_and_when_it_is_refused(tmp_path):
    data = build(tmp_path / "a.vkv", STORE, (one((2, 4), "a"),))
    source = Watched(data)
    with Document(source):
        assert not source.closed
    assert source.closed
    for bad in (data[:-1], data.replace(b"\xa31.0", b"\xa32.0")):
        source = Watched(bad)
        with pytest.raises(VkvError):
            Document(source)
        assert source.closed


def test_messages_start_with_the_path(tmp_path):
    (tmp_path / "a.vkv").write_bytes(b"short")
    with pytest.raises(VkvError) as caught:
        open_document(tmp_path / "a.vkv")
    assert str(caught.value) == f"{tmp_path / 'a.vkv'}: 5 bytes, expected at least 8 [C1]"
