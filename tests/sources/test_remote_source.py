"""Files behind URLs: which ranges are read, and what goes wrong in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import vkv
from tests.helpers import servers
from vkv.errors import ContainerError, DigestError, MissingFileError, VkvError
from vkv.format.document import open_document
from vkv.sources import http as http_source
from vkv.sources import objects, retries
from vkv.sources.base import FIRST_READ
from vkv.sources.objects import filesystem
from vkv.sources.opening import open_source
from vkv.sources.urls import folder_of, in_folder, is_url, name_of, shown


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of 1.3 MB: its header is a small part of it."""
    cache = KVCache()
    keys, values = (
        mx.random.normal((1, 4, 1280, 64), mx.float16, key=mx.random.key(i)) for i in (0, 1)
    )
    cache.update_and_fetch(keys, values)
    found = tmp_path_factory.mktemp("remote") / "a.vkv"
    vkv.save(found, [cache], tokens=range(1280), codec={"keys": "affine:bits=4"})
    return found


@pytest.fixture(scope="module")
def data(path):
    return path.read_bytes()


@pytest.fixture
def web(data):
    with servers.web(files={"/a.vkv": data}) as found:
        yield found


@pytest.mark.parametrize("url", ["s3://bucket/a", "s3a://bucket/a", "simplecache::s3://bucket/a"])
def test_each_link_of_a_chain_gets_its_options(url):
    files, _ = filesystem(url)
    last = getattr(files, "fs", files)
    assert (last.config_kwargs["read_timeout"], last.retries) == (30, objects.MAX_TRIES)
    files, _ = filesystem("simplecache::http://127.0.0.1:1/a")
    assert files.fs.client_kwargs["trust_env"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://host/a.vkv", True),
        ("S3://bucket/a.vkv", True),
        ("simplecache::s3://bucket/a", True),
        ("file:///a.vkv", True),
        ("a.vkv", False),
        ("./https://a", False),
        ("C:/a.vkv", False),
        ("C:\\a.vkv", False),
        (b"https://a", False),
        ("", False),
    ],
)
def test_is_url(text, expected):
    assert is_url(text) is expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host/a.vkv", "https://host/a.vkv"),
        ("https://me:pass@host/a.vkv", "https://host/a.vkv"),
        ("https://host/a.vkv?X-Amz-Signature=1#x", "https://host/a.vkv"),
        ("https://host/a@b.vkv", "https://host/a@b.vkv"),
    ],
)
def test_secrets_of_a_url_are_not_shown(url, expected):
    assert shown(url) == expected


@pytest.mark.parametrize(
    ("url", "folder", "beside"),
    [
        ("https://h/a/b.vkv", "https://h/a", "https://h/a/c.vkv"),
        ("https://u:p@h/a/b.vkv?t=1/2#x", "https://u:p@h/a?t=1/2", "https://u:p@h/a/c.vkv?t=1/2"),
        ("s3://b/a#1/b.vkv", "s3://b/a#1", "s3://b/a#1/c.vkv"),
    ],
)
def test_folders_of_urls_keep_what_gives_access(url, folder, beside):
    assert (folder_of(url), name_of(url)) == (folder, "b.vkv")
    assert in_folder(folder, "c.vkv") == beside


def test_a_dependency_is_asked_for_with_the_token_of_the_file(web, tmp_path):
    cache = KVCache()
    cache.update_and_fetch(*[mx.random.normal((1, 2, 200, 64)) for _ in range(2)])
    first = vkv.save(tmp_path / "a.vkv", [cache], tokens=range(200))
    cache.update_and_fetch(*[mx.random.normal((1, 2, 200, 64)) for _ in range(2)])
    vkv.save(tmp_path / "b.vkv", [cache], tokens=range(400), parent=tmp_path / "a.vkv")
    web.files |= {
        f"/d/{first.id}.vkv": (tmp_path / "a.vkv").read_bytes(),
        "/d/b.vkv": (tmp_path / "b.vkv").read_bytes(),
    }
    web.secret = "token=secret"
    assert len(vkv.load(f"{web.url}/d/b.vkv?token=secret").tokens) == 400
    del web.files[f"/d/{first.id}.vkv"]
    with pytest.raises(MissingFileError) as caught:
        vkv.load(f"{web.url}/d/b.vkv?token=secret")
    assert "secret" not in str(caught.value)


PROXY = """if True:
    import sys, vkv
    try:
        vkv.inspect(sys.argv[1])
    except OSError as exc:
        print(exc.strerror)
"""


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxies_of_the_environment_are_used(scheme):
    with servers.web(status=403) as proxy:
        own = {f"{scheme}_proxy": proxy.url, "no_proxy": "", "NO_PROXY": ""}
        command = [sys.executable, "-c", PROXY, f"{scheme}://a.invalid/x.vkv"]
        run = {"capture_output": True, "text": True, "check": True}
        said = subprocess.run(command, env=os.environ | own, **run).stdout
    assert "403" in said or "cannot be reached" in said, said
    assert [path for path, _ in proxy.asked][:1] == [
        "http://a.invalid/x.vkv" if scheme == "http" else "a.invalid:443"
    ]


def test_inspect_is_one_request_for_the_first_bytes(path, web):
    there = vkv.inspect(f"{web.url}/a.vkv?signature=1")
    assert web.asked == [("/a.vkv?signature=1", f"bytes=0-{FIRST_READ - 1}")]
    here = vkv.inspect(path)
    assert (there.id, there.size, there.header) == (here.id, here.size, here.header)
    assert there.path == f"{web.url}/a.vkv"


def test_load_reads_every_byte_once(path, web, data):
    here, there = vkv.load(path), vkv.load(f"{web.url}/a.vkv")
    assert there.tokens == here.tokens
    for x, y in zip(here.cache[0].state[:2], there.cache[0].state[:2], strict=True):
        assert mx.array_equal(x, y)
    assert web.sent <= len(data) + FIRST_READ


def test_validate_diff_and_convert(path, web, tmp_path):
    url = f"{web.url}/a.vkv"
    assert vkv.validate(url, deep=True).ok
    assert vkv.diff(path, url, deep=True).same
    vkv.convert(url, tmp_path / "raw.vkv")
    vkv.convert(path, tmp_path / "same.vkv")
    assert (tmp_path / "raw.vkv").read_bytes() == (tmp_path / "same.vkv").read_bytes()


def test_damage_behind_a_url_is_found(web, data):
    web.files["/a.vkv"] = data[:-1] + bytes([data[-1] ^ 1])
    assert [f.rule for f in vkv.validate(f"{web.url}/a.vkv").findings][:1] == ["D1"]


@pytest.mark.parametrize("fault", [{"cut": 300_000}, {"cut": 65_536}, {"piece": 65_536}], ids=str)
def test_what_is_missing_of_a_range_is_asked_for_again(web, data, fault):
    """However many answers it takes: only those without a byte count."""
    for name, value in fault.items():
        setattr(web, name, value)
    source = open_source(f"{web.url}/a.vkv")
    assert source.read(0, len(data)) == data
    assert web.sent <= len(data) + FIRST_READ


@pytest.mark.parametrize(
    "tags", [('"a"', 'W/"a"'), ('"node 1"', '"node 2"'), ('"a"', None)], ids=str
)
def test_digests_decide_and_not_etags(path, web, data, tags):
    web.tags = tags
    assert vkv.load(f"{web.url}/a.vkv").tokens == vkv.load(path).tokens
    web.files["/a.vkv"] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(DigestError):
        vkv.load(f"{web.url}/a.vkv")


@pytest.mark.parametrize("size", [5, FIRST_READ, FIRST_READ + 1, 300_000])
def test_a_size_that_is_not_said_is_found(web, data, size):
    web.total, web.files["/a.vkv"] = "*", data[:size]
    source = open_source(f"{web.url}/a.vkv")
    assert (source.size, source.read(0, size)) == (size, data[:size])


def test_a_server_that_asks_for_time_gets_it(web, data, monkeypatch):
    web.later, web.retry_after = 2 * retries.MAX_FAILURES, "0"
    assert open_source(f"{web.url}/a.vkv").read(0, len(data)) == data
    web.retry_after = "3600"
    with pytest.raises(OSError, match="HTTP 429"):
        open_source(f"{web.url}/a.vkv").read(0, len(data))


def test_a_server_that_sends_nothing_is_asked_a_few_times(web):
    web.cut = 0
    with pytest.raises(OSError, match="the connection was cut"):
        open_source(f"{web.url}/a.vkv")
    assert len(web.asked) == retries.MAX_FAILURES


def test_a_busy_server_is_asked_again(web, data):
    web.busy = 2
    assert vkv.inspect(f"{web.url}/a.vkv").size == len(data)
    web.busy = retries.MAX_FAILURES
    with pytest.raises(OSError, match="HTTP 503"):
        vkv.inspect(f"{web.url}/a.vkv")


def test_without_ranges_a_small_file_is_read_whole(path, web, data, monkeypatch):
    web.ranges = False
    assert vkv.inspect(f"{web.url}/a.vkv").id == vkv.inspect(path).id
    assert len(web.asked) == 2
    monkeypatch.setattr(http_source, "MAX_WHOLE", len(data) - 1)
    with pytest.raises(OSError, match="the server has no ranged reads") as caught:
        vkv.inspect(f"{web.url}/a.vkv")
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == f"{web.url}/a.vkv"


def test_a_file_that_is_replaced_while_it_is_read(web, data):
    source = open_source(f"{web.url}/a.vkv")
    web.files["/a.vkv"] = data + b"x"
    with pytest.raises(OSError, match="when it was opened"):
        source.read(0, len(data))
    web.ranges = False
    with pytest.raises(VkvError, match="the server stopped serving ranges"):
        source.read(0, len(data))


@pytest.mark.parametrize(
    "told", ["bytes 5-9/100", "bytes 0-9", "chars 0-9/10", "bytes */100", "bytes 0-9/"]
)
def test_an_answer_of_another_range_is_refused(web, told):
    web.told = told
    with pytest.raises(OSError, match="expected 206 from byte 0"):
        open_source(f"{web.url}/a.vkv")


def test_more_than_was_asked_for_is_not_taken(web, data):
    source = open_source(f"{web.url}/a.vkv")
    web.told = f"bytes 100000-999999/{len(data)}"
    buffer = memoryview(bytearray(8))
    source.readinto(100_000, buffer)
    assert buffer == data[100_000:100_008]


def test_a_range_past_the_end_is_refused_before_it_is_asked_for(web, data):
    source = open_source(f"{web.url}/a.vkv")
    with pytest.raises(ContainerError, match=f"ends at byte {len(data)}, expected"):
        source.read(0, 1 << 50)
    assert len(web.asked) == 1


def test_an_empty_file(web):
    web.files["/a.vkv"] = b""
    with pytest.raises(ContainerError, match="0 bytes, expected at least 8"):
        vkv.inspect(f"{web.url}/a.vkv")


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (404, FileNotFoundError, "not found: HTTP 404"),
        (403, PermissionError, "access denied: HTTP 403"),
        (500, OSError, "HTTP 500"),
    ],
)
def test_what_a_server_refuses(web, status, error, words):
    web.status = status
    with pytest.raises(error, match=words) as caught:
        vkv.inspect(f"{web.url}/a.vkv?secret")
    assert caught.value.filename == f"{web.url}/a.vkv"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xfe garbage\r\n\r\n",
        b"HTTP/1.1 500 evil\x1b[31m line " + b"x" * 5000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_a_server_says_is_one_short_line(web, raw):
    web.raw = raw
    with pytest.raises(OSError, match=r"refused: HTTP [45]00") as caught:
        vkv.inspect(f"{web.url}/a.vkv")
    assert 0 < len(caught.value.strerror) <= 200
    assert str(caught.value).isprintable()


def test_no_server():
    with servers.web() as gone:
        url = f"{gone.url}/a.vkv"
    with pytest.raises(ConnectionRefusedError, match="cannot be reached") as caught:
        vkv.inspect(url)
    assert caught.value.filename == url


@pytest.mark.parametrize(
    ("package", "url", "words"),
    [
        ("fsspec.core", "https://host/a", "a URL needs the package fsspec"),
        ("aiohttp", "https://host/a", "a package is missing"),
        ("s3fs", "s3://bucket/a", "a package is missing"),
    ],
)
def test_a_missing_package(package, url, words):
    code = "import sys; sys.modules[sys.argv[1]] = None; import vkv; vkv.inspect(sys.argv[2])"
    command = [sys.executable, "-c", code, package, url]
    last = subprocess.run(command, capture_output=True, text=True, check=False).stderr.split("\n")
    assert last[-2].startswith(f"vkv.errors.VkvError: {url}: {words}")
    assert last[-2].endswith(": pip install 'vkv[remote]'")


def test_an_unknown_scheme():
    with pytest.raises(VkvError, match="nonsense://a: Protocol not known: nonsense"):
        vkv.inspect("nonsense://a")


def test_any_file_system_of_fsspec(path, data):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/place/a.vkv", data)
    here = vkv.inspect(path)
    for url in ("memory://place/a.vkv", path.as_uri()):
        assert vkv.inspect(url).id == here.id
        assert vkv.load(url).tokens == list(range(1280))
    with pytest.raises(FileNotFoundError, match="not found"):
        vkv.inspect("memory://place/b.vkv")
    with pytest.raises(IsADirectoryError):
        vkv.inspect("memory://place")


def test_a_document_is_closed_without_harm(web):
    document = open_document(f"{web.url}/a.vkv")
    document.close()
    assert document.size == len(web.files["/a.vkv"])


def test_a_foreign_file_behind_a_url(web, tmp_path):
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.zeros(1)}, {"a": "b"})
    web.files["/x"] = (tmp_path / "x.safetensors").read_bytes()
    with pytest.raises(ContainerError, match="is read from a local file: download it first"):
        vkv.convert(f"{web.url}/x", tmp_path / "x.vkv")
