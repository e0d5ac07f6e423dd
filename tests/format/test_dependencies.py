"""Where dependencies are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkv.errors import MissingFileError, VkvError
from vkv.format import container
from vkv.format.dependencies import FileResolver
from vkv.format.document import open_document
from vkv.format.file_id import FileId, from_bytes, is_file_id
from vkv.sources.memory import BytesSource

GOOD = Path(__file__).parents[2] / "fixtures" / "v1" / "good"


@pytest.mark.parametrize("value", [5, None, b"/tmp", ["/tmp"]])
def test_what_is_no_search_path(value):
    with pytest.raises(VkvError, match=r"a search path is a .*, expected str or"):
        FileResolver([value])


def test_a_file_is_found_by_its_id_in_files_and_folders(tmp_path):
    with open_document(GOOD / "files-parent.vkv") as document:
        file_id = document.id
    for place in (GOOD, GOOD / "files-parent.vkv"):
        with FileResolver([tmp_path / "nothing", place]).open(file_id) as found:
            assert (found.id, found.name) == (file_id, str(GOOD / "files-parent.vkv"))
    with pytest.raises(MissingFileError, match=file_id) as caught:
        FileResolver([tmp_path]).open(file_id)
    assert caught.value.search_paths == [str(tmp_path)]


@pytest.mark.parametrize("path", sorted(GOOD.glob("*.vkv")), ids=lambda p: p.stem)
def test_the_id_is_in_the_first_bytes(path):
    raw = path.read_bytes()
    with open_document(raw) as document:
        assert container.peek_id(BytesSource(raw[:256])) == document.id
        assert container.has_id(BytesSource(raw), document.id)
        assert not container.has_id(BytesSource(raw), FileId("0" * 64))
        assert not container.has_id(BytesSource(raw[:300]), document.id)


def test_bytes_without_an_id():
    for raw in (b"", b"12345678", (8).to_bytes(8, "little") + b"{}      ", b"\xff" * 300):
        assert container.peek_id(BytesSource(raw)) is None
        assert not container.has_id(BytesSource(raw), FileId("0" * 64))


def test_what_is_an_id():
    assert is_file_id(from_bytes(bytes(32)))
    for value in ("0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", bytes(32), None):
        assert not is_file_id(value)
