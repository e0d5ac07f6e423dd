"""One suite for every source of bytes: a new one joins by a line in ``SOURCES``.

Each test says one thing that readers rely on. What only one source promises is tested in
``tests/sources``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vkv
from tests.helpers import servers
from tests.helpers.stores import cache_of
from vkv.errors import ContainerError, VkvError
from vkv.format.document import Document
from vkv.sources.base import FIRST_READ, Source
from vkv.sources.local import FileSource
from vkv.sources.memory import BytesSource
from vkv.sources.opening import open_source

Opened = contextlib.AbstractContextManager[Callable[[str], Source]]


@contextlib.contextmanager
def local(folder: Path, data: dict[str, bytes]) -> Iterator[Callable[[str], Source]]:
    for name, content in data.items():
        (folder / name).write_bytes(content)
    yield lambda name: FileSource(folder / name)


@contextlib.contextmanager
def memory(folder: Path, data: dict[str, bytes]) -> Iterator[Callable[[str], Source]]:
    def opened(name: str) -> Source:
        if name not in data:
            raise FileNotFoundError(name)
        return BytesSource(data[name])

    yield opened


@contextlib.contextmanager
def http(folder: Path, data: dict[str, bytes], **behaviour: object) -> Iterator[object]:
    with servers.web(files={f"/{n}": c for n, c in data.items()}, **behaviour) as web:
        yield lambda name: open_source(f"{web.url}/{name}")


def http_whole(folder: Path, data: dict[str, bytes]) -> Opened:
    """A server without ranges."""
    return http(folder, data, ranges=False)


def http_in_pieces(folder: Path, data: dict[str, bytes]) -> Opened:
    """A server that answers with a part of each range and does not say the size."""
    return http(folder, data, piece=30_000, total="*")


@contextlib.contextmanager
def objects(root: str, data: dict[str, bytes]) -> Iterator[Callable[[str], Source]]:
    import fsspec

    files, path = fsspec.core.url_to_fs(root)
    if root.startswith("s3"):
        files.mkdir(path.partition("/")[0])
    for name, content in data.items():
        files.pipe_file(f"{path}/{name}", content)
    yield lambda name: open_source(f"{root}/{name}")


def in_memory(folder: Path, data: dict[str, bytes]) -> Opened:
    return objects(f"memory://{folder.name}", data)


def file_url(folder: Path, data: dict[str, bytes]) -> Opened:
    return objects(folder.as_uri(), data)


def s3(folder: Path, data: dict[str, bytes]) -> Opened:
    bucket = folder.name.replace("_", "-").lower()[-40:].strip("-")
    return objects(f"s3://{bucket}/place", data)


SOURCES = [local, memory, http, http_whole, http_in_pieces, in_memory, file_url, s3]


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict[str, bytes]:
    """A vkv file larger than the first read, a short file, and an empty one."""
    path = tmp_path_factory.mktemp("sources") / "a.vkv"
    tokens = [n % 50 for n in range(400)]
    vkv.save(path, cache_of(tokens), tokens=tokens)
    data = {"a.vkv": path.read_bytes(), "short": bytes(range(100)), "empty": b""}
    assert len(data["a.vkv"]) > 2 * FIRST_READ
    return data


@pytest.fixture(scope="module", autouse=True)
def s3_server():
    with servers.s3() as url:
        yield url


@pytest.fixture(params=SOURCES, ids=lambda kind: kind.__name__)
def opened(request, tmp_path, content) -> Iterator[Callable[[str], Source]]:
    with request.param(tmp_path, content) as open_one:
        yield open_one


@pytest.mark.parametrize("name", ["a.vkv", "short", "empty"])
def test_size_and_bytes_are_those_that_were_stored(opened, content, name):
    source = opened(name)
    assert source.size == len(content[name])
    assert source.read(0, source.size) == content[name]
    source.close()


@pytest.mark.parametrize(("start", "size"), [(0, 8), (5, 0), (70_000, 10), (65_530, 12), (1, 99)])
def test_a_range_is_the_bytes_at_its_place(opened, content, start, size):
    source, expected = opened("a.vkv"), content["a.vkv"][start : start + size]
    assert source.read(start, size) == expected
    buffer = memoryview(bytearray(size))
    source.readinto(start, buffer)
    assert buffer == expected
    source.close()


def test_what_lies_behind_the_end_is_refused(opened):
    source = opened("short")
    for start, size in ((0, 101), (100, 1), (1 << 40, 8)):
        with pytest.raises(ContainerError, match="ends at byte 100, expected") as caught:
            source.read(start, size)
        assert caught.value.rule == "C1"
    source.close()


def test_what_is_missing_is_the_error_of_a_missing_file(opened):
    with pytest.raises(FileNotFoundError):
        opened("missing")


def test_closing_twice_does_no_harm(opened):
    source = opened("short")
    source.close()
    source.close()


def test_a_document_is_the_same_from_every_source(opened, content):
    expected = Document(BytesSource(content["a.vkv"]))
    with Document(opened("a.vkv")) as document:
        assert (document.id, document.size) == (expected.id, expected.size)
        assert document.header == expected.header
        assert document.tokens() == expected.tokens()
        document.check_all()


def test_a_file_that_is_none_raises_only_vkv_errors(opened):
    for name in ("short", "empty"):
        with pytest.raises(VkvError):
            Document(opened(name))
