"""Single files to URLs and back: whole, checked, and never in the place of another."""

from __future__ import annotations

import fsspec
import pytest
from vkv_cli.main import main

import vkv
from tests.helpers import servers
from tests.helpers.stores import cache_of
from vkv.errors import DigestError, VkvError

IDS = [n % 50 for n in range(40)]


@pytest.fixture(params=["memory", "file"])
def folder(request, tmp_path):
    """URL of an empty folder."""
    memory = f"memory://{tmp_path.parent.name}-{tmp_path.name}/"
    return memory if request.param == "memory" else (tmp_path / "there").as_uri() + "/"


@pytest.fixture
def path(tmp_path):
    vkv.save(tmp_path / "a.vkv", cache_of(IDS), tokens=IDS)
    return tmp_path / "a.vkv"


def test_pushed_and_pulled(folder, path, tmp_path):
    calls = []
    info = vkv.push(path, folder, progress=lambda *done: calls.append(done))
    assert (info.id, info.path) == (vkv.inspect(path).id, f"{folder}a.vkv")
    if not folder.startswith("file:"):  # fsspec copies local files without a word
        assert calls[-1] == (path.stat().st_size,) * 2
    files, root = fsspec.core.url_to_fs(folder)
    assert [name.rpartition("/")[2] for name in files.find(root)] == ["a.vkv"]
    (tmp_path / "here").mkdir()
    pulled = vkv.pull(info.path, tmp_path / "here")
    assert pulled.id == info.id
    assert (tmp_path / "here" / "a.vkv").read_bytes() == path.read_bytes()
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["a.vkv"]


def test_over_s3(path, tmp_path):
    with servers.s3():
        fsspec.filesystem("s3").mkdir("single")
        info = vkv.push(path, "s3://single/some/where.vkv")
        fsspec.filesystem("s3").pipe("single/other.vkv", b"other")
        with pytest.raises(VkvError, match="expected nothing or"):
            vkv.push(path, "s3://single/other.vkv")
        assert vkv.pull("s3://single/some/where.vkv", tmp_path / "b.vkv").id == info.id


def test_another_file_is_not_replaced(folder, path, tmp_path):
    url = f"{folder}x.vkv"
    vkv.push(path, url)
    vkv.push(path, url, progress=lambda *_: pytest.fail("sent again"))
    vkv.save(tmp_path / "b.vkv", cache_of(IDS[:20]), tokens=IDS[:20])
    with pytest.raises(VkvError, match="expected nothing or"):
        vkv.push(tmp_path / "b.vkv", url)
    assert vkv.inspect(url).id == vkv.inspect(path).id
    assert vkv.push(tmp_path / "b.vkv", url, force=True).tokens == 20


def test_what_is_no_vkv_file_is_not_replaced_either(tmp_path, path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(VkvError, match="no sound vkv file"):
        vkv.push(path, (tmp_path / "notes.txt").as_uri())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_damage_is_neither_sent_nor_fetched(folder, path, tmp_path):
    url = vkv.push(path, folder).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError):
        vkv.push(path, f"{folder}b.vkv")
    files, where = fsspec.core.url_to_fs(url)
    files.pipe_file(where, bytes(data))
    (tmp_path / "old.vkv").write_bytes(b"old")
    with pytest.raises(DigestError):
        vkv.pull(url, tmp_path / "old.vkv")
    assert (tmp_path / "old.vkv").read_bytes() == b"old"


def test_a_file_that_the_new_one_depends_on_is_not_replaced(path, tmp_path):
    longer = [*IDS, *range(30)]
    vkv.save(tmp_path / "b.vkv", cache_of(longer), tokens=longer, parent=path)
    info = vkv.push(tmp_path / "b.vkv", f"memory://{tmp_path.name}/")
    assert info.dependencies
    with pytest.raises(VkvError) as refused:
        vkv.pull(info.path, path)
    assert refused.value.rule == "L10"


@pytest.mark.parametrize("url", ["https://example.org/a.vkv", "a.vkv", "nothing://a/b.vkv"])
def test_urls_that_cannot_be_written(path, url):
    with pytest.raises(VkvError):
        vkv.push(path, url)


def test_on_the_command_line(path, tmp_path, capsys):
    url = f"memory://{tmp_path.name}/a.vkv"
    assert main(["push", str(path), url]) == 0
    assert vkv.inspect(path).id in capsys.readouterr().out
    assert main(["pull", url, str(tmp_path / "b.vkv")]) == 0
    assert (tmp_path / "b.vkv").read_bytes() == path.read_bytes()
    assert main(["push", str(path), "https://example.org/a.vkv"]) == 1
    assert main(["pull", url, "s3://bucket/a.vkv"]) == 2
