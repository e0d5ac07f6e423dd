"""URLs on the command line."""

from __future__ import annotations

import pytest

import vkv
from tests.helpers import servers


@pytest.fixture
def web(files):
    names = ("raw.vkv", "affine.vkv")
    with servers.web(files={f"/{n}": (files / n).read_bytes() for n in names}) as found:
        yield found


def test_commands_that_read_take_urls(run, files, web, tmp_path):
    url = f"{web.url}/raw.vkv"
    assert run("inspect", "-q", url).out.strip() == vkv.inspect(files / "raw.vkv").id
    assert run("inspect", url).out.startswith(f"{url}\n")
    assert run("validate", "--deep", url).out.endswith(f"{url}: ok\n")
    assert (
        run("diff", url, files / "raw.vkv").out
        == "no difference\ndigests not checked; `vkv validate` does, and --deep compares values\n"
    )
    assert run("convert", url, tmp_path / "a.vkv").status == 0
    assert vkv.inspect(tmp_path / "a.vkv").id == vkv.inspect(files / "raw.vkv").id


@pytest.mark.parametrize("command", ["inspect", "validate", "generate"])
def test_an_error_is_one_line_that_names_the_url(run, web, command):
    extra = ["-p", "x"] if command == "generate" else []
    ran = run(command, f"{web.url}/none.vkv?secret=1", *extra)
    expected = f"vkv: error: {web.url}/none.vkv: not found: HTTP 404 Not Found\n"
    assert (ran.status, ran.out, ran.err) == (1, "", expected)


def test_generate_from_a_url(run, saved, model, web):
    web.files["/saved.vkv"] = saved.read_bytes()
    args = ("--model", model, "-p", "go", "-m", "4", "--verbose", "false")
    there = run("generate", f"{web.url}/saved.vkv", *args)
    assert (there.status, there.err) == (0, "")
    assert there.out == run("generate", saved, *args).out
