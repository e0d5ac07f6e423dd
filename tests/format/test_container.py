"""The framing: what is written, what is read, what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from blake3 import blake3

from vkv.errors import ContainerError
from vkv.format import container, container_write, dtypes, framing, limits
from vkv.format.file_id import FileId
from vkv.format.framing import Form
from vkv.sources import base
from vkv.sources.local import FileSource
from vkv.sources.memory import BytesSource

FORMS: list[Form] = [
    ("ids", "U32", (3,)),
    ("odd", "U8", (5,)),
    ("keys", "F16", (1, 2, 3, 4)),
    ("none", "F32", (0, 7)),
    ("one", "I64", ()),
    ("Grüße", "BF16", (2, 2)),
]


def content(form: Form) -> bytes:
    _, dtype, shape = form
    size = int(np.prod(shape)) * dtypes.ITEMSIZE[dtype]
    return np.random.default_rng(0).bytes(size)


def written(path, forms: list[Form] = FORMS) -> bytes:
    loads: list[tuple[Form, Callable[[], bytes]]] = [
        (form, lambda form=form: content(form)) for form in forms
    ]
    with open(path, "wb") as out:
        container_write.write(out.fileno(), loads, lambda digests: b"".join(digests))
    return path.read_bytes()


def refused(data: bytes, rule: str) -> str:
    with pytest.raises(ContainerError) as caught:
        container.parse(BytesSource(data))
    assert caught.value.rule == rule
    return str(caught.value)


class Counting(FileSource):
    """Counts the bytes that are asked for."""

    count = 0

    def readinto(self, start: int, buffer: memoryview) -> None:
        self.count += len(buffer)
        super().readinto(start, buffer)


def test_what_is_written_is_read(tmp_path):
    data = written(tmp_path / "a.vkv")
    entries = container.parse(BytesSource(data)).entries
    assert list(entries) == [framing.HEADER, *(name for name, _, _ in FORMS)]
    for form in FORMS:
        entry = entries[form[0]]
        assert (entry.name, entry.dtype, entry.shape) == form
        assert data[entry.start : entry.stop] == content(form)
    header = entries[framing.HEADER]
    digests = b"".join(container_write.digest(content(form)) for form in FORMS)
    assert data[header.start : header.stop] == digests


def test_layout_is_fixed_to_the_byte(tmp_path):
    data = written(tmp_path / "a.vkv", [("x", "U8", (2,))])
    digests = container_write.digest(content(("x", "U8", (2,))))
    text = (
        '{"__metadata__":{"format":"vkv","vkv":"1.0","id":"' + blake3(digests).hexdigest() + '"},'
        '"vkv.header":{"dtype":"U8","shape":[32],"data_offsets":[0,32]},'
        '"x":{"dtype":"U8","shape":[2],"data_offsets":[32,34]}}'
    )
    size = -(-(8 + len(text)) // 64) * 64 - 8
    assert data[: 8 + size] == size.to_bytes(8, "little") + text.encode().ljust(size)
    assert len(data) == 8 + size + 34
    assert data == written(tmp_path / "b.vkv", [("x", "U8", (2,))])


def test_other_libraries_open_it(tmp_path):
    forms = [f for f in FORMS if f[0] != "none"]  # MLX has no arrays of no values
    data = written(tmp_path / "a.vkv", forms)
    found = {name: bytes(t["data"]) for name, t in safetensors.deserialize(data)}
    loaded = mx.load(str(tmp_path / "a.vkv"), format="safetensors")
    for form in forms:
        assert found[form[0]] == content(form)
        assert loaded[form[0]].shape == form[2]
        assert loaded[form[0]].nbytes == len(content(form))
    with safetensors.safe_open(tmp_path / "a.vkv", "numpy") as file:
        parsed = container.parse(BytesSource(data))
        assert file.metadata() == {"format": "vkv", "vkv": "1.0", "id": parsed.id}


def test_parsing_reads_the_table_and_no_data(tmp_path):
    data = written(tmp_path / "a.vkv", [("big", "U8", (1 << 22,))])
    source = Counting(tmp_path / "a.vkv")
    assert container.parse(source).entries["big"].stop == len(data)
    assert source.count == base.FIRST_READ
    source.close()


def test_table_longer_than_the_first_read(tmp_path):
    forms: list[Form] = [(f"tensor.{i}", "U8", (1,)) for i in range(2000)]
    written(tmp_path / "a.vkv", forms)
    source = Counting(tmp_path / "a.vkv")
    entries = container.parse(source).entries
    assert len(entries) == 2001
    assert base.FIRST_READ < source.count == entries[framing.HEADER].start
    source.close()


def test_table_of_just_more_than_the_limit():
    def framed(name: str) -> bytes:
        return framing.frame(
            "1.0", FileId("0" * 64), [(framing.HEADER, "U8", (1,)), (name, "U8", (0,))]
        )

    room = limits.MAX_JSON - len(framed("")) + 8
    longest = framed("x" * (room // 64 * 64))
    assert limits.MAX_JSON - 64 < len(longest) - 8 <= limits.MAX_JSON
    assert container.parse(BytesSource(longest + b"h")).entries[framing.HEADER].nbytes == 1
    longer = (limits.MAX_JSON + 1).to_bytes(8, "little") + longest[8:].ljust(limits.MAX_JSON + 1)
    assert "the limit is 2097152" in refused(longer + b"h", "C2")


@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        (lambda d: d[:3], "C1", "3 bytes, expected at least 8"),
        (lambda d: d[:100], "C1", "the file at 100"),
        (lambda d: b"GGUF" + d[4:], "C2", "not a vkv file: a GGUF file"),
        (lambda d: b"PK\3\4" + d[4:], "C2", "not a vkv file: a zip archive"),
        (lambda d: "Grüße an alle: über Caches\n".encode() * 9, "C2", "not a vkv file: text"),
        (
            lambda d: b"\xff" * 8 + d[8:],
            "C2",
            "it would have a JSON header of 18446744073709551615",
        ),
        (lambda d: d[:-1], "C6", "the file is cut short"),
        (lambda d: d + b"x", "C6", "trailing bytes"),
        (
            lambda d: d.replace(b'"vkv","vkv"', b'"vkw","vkv"'),
            "C8",
            "header damaged: format is 'vkw'",
        ),
        (lambda d: d.replace(b'"id":"', b'"ie":"'), "C8", "header damaged: holds format, ie, vkv"),
        (lambda d: d.replace(b'"id":"', b'"id":"x'), "C8", "expected 64 hex digits"),
        (
            lambda d: d.replace(b'"dtype":"U8","shape":[5]', b'"shape":[5],"dtype":"U8"'),
            "C10",
            "header damaged: JSON of",
        ),
        (lambda d: safetensors.numpy.save({"a": np.ones(3)}), "C8", "not a vkv file"),
        (lambda d: d.replace(b'"ids"', b'"odd"'), "C3", "'odd' stands twice"),
    ],
)
def test_messages_say_found_and_expected(tmp_path, change, rule, says):
    assert says in refused(change(written(tmp_path / "a.vkv")), rule)


def test_writer_refuses_what_a_reader_would(tmp_path):
    def write(forms: list[Form], data: bytes, header=lambda digests: b"h") -> None:
        with open(tmp_path / "a.vkv", "wb") as out:
            container_write.write(out.fileno(), [(f, lambda: data) for f in forms], header)

    for forms, data, rule in (
        ([("x", "U8", (2,))], b"123", "C5"),
        ([("x" * limits.MAX_JSON, "U8", (1,))], b"1", "C2"),
    ):
        with pytest.raises(ContainerError) as caught:
            write(forms, data)
        assert caught.value.rule == rule
    grows = iter((b"h", b"hh"))
    with pytest.raises(ContainerError) as caught:
        write([], b"", lambda digests: next(grows))
    assert caught.value.rule == "C7"


def test_writer_asks_for_each_tensor_once_in_order_in_its_own_thread(tmp_path):
    asked = []

    def load(name: str) -> bytes:
        asked.append((name, threading.get_ident()))
        return b"12"

    forms: list[Form] = [(str(i), "U8", (2,)) for i in range(20)]
    with open(tmp_path / "a.vkv", "wb") as out:
        loads = [(f, lambda n=f[0]: load(n)) for f in forms]
        container_write.write(out.fileno(), loads, lambda digests: b"h")
    assert asked == [(f[0], threading.get_ident()) for f in forms]


def test_error_of_a_load_ends_the_writing(tmp_path):
    def fail() -> bytes:
        raise KeyError("x")

    with open(tmp_path / "a.vkv", "wb") as out, pytest.raises(KeyError):
        container_write.write(out.fileno(), [(("x", "U8", (2,)), fail)], lambda digests: b"h")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ContainerError, match="not a regular file") as caught:
            FileSource(path)  # a pipe must not block either
        assert caught.value.rule == "C1"
    with pytest.raises(IsADirectoryError):
        FileSource(tmp_path)
    with pytest.raises(FileNotFoundError):
        FileSource(tmp_path / "nothing")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    data = written(tmp_path / "a.vkv")
    source = FileSource(tmp_path / "a.vkv")
    os.truncate(tmp_path / "a.vkv", len(data) - 10)
    with pytest.raises(ContainerError, match=f"ends at byte {len(data) - 10}") as caught:
        source.read(0, len(data))
    assert caught.value.rule == "C1"
    source.close()


def test_file_that_is_replaced_stays_what_it_was(tmp_path):
    old = written(tmp_path / "a.vkv")
    source = FileSource(tmp_path / "a.vkv")
    written(tmp_path / "b.vkv", FORMS[:1])
    os.replace(tmp_path / "b.vkv", tmp_path / "a.vkv")
    assert source.read(0, source.size) == old
    source.close()


def test_bytes_are_read_like_a_file(tmp_path):
    data = written(tmp_path / "a.vkv")
    memory, file = BytesSource(data), FileSource(tmp_path / "a.vkv")
    assert memory.size == file.size
    for start, size in ((0, 8), (3, 100), (len(data), 0), (len(data) - 1, 1)):
        assert memory.read(start, size) == file.read(start, size)
    for source in (memory, file):
        with pytest.raises(ContainerError, match="ends at byte"):
            source.read(len(data) - 1, 2)
        source.close()
