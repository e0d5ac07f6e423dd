"""``vkv store push``, ``pull`` and ``ls-remote``."""

from __future__ import annotations

import pytest
from vkv_cli import text

import vkv
from fixtures.models import tiny
from tests.helpers import servers
from tests.helpers.stores import cache_of
from vkv.store.remote.objects import object_name


@pytest.fixture
def url(tmp_path):
    return (tmp_path / "there").as_uri()


@pytest.fixture
def here(tmp_path, saved):
    store = vkv.PromptStore(tmp_path / "here")
    store.add(saved)
    return store


def test_there_and_back(run, here, saved, url, tmp_path, monkeypatch):
    (entry,) = here.ls()
    args = ("--remote", url, "--store")
    ran = run("store", "push", entry.id[:8], *args, here.root)
    assert (ran.status, ran.out, ran.err) == (
        0,
        f"{entry.id[:12]}  {entry.id[:8]}: {text.exact_size(entry.size)}\n"
        f"sent 1 to {url}, {text.size(entry.size)}\n",
        "",
    )
    assert run("store", "push", saved, *args, here.root).out.endswith(
        f"{saved}: there already\nsent 0 to {url}, 0 bytes, 1 there already\n"
    )
    monkeypatch.setenv("VKV_REMOTE", url)
    head, row, total = run("store", "ls-remote").out.splitlines()
    assert head.split() == ["ID", "SIZE"]
    assert row.split()[0] == entry.id
    assert total == f"1 file, {text.size(entry.size)} at {url}"
    assert run("store", "ls-remote", "--json").json["size"] == entry.size
    ran = run("store", "pull", entry.id[:8], "--store", tmp_path / "other", "--json")
    assert (ran.json["id"], ran.json["tokens"]) == (entry.id, entry.tokens)
    assert [e.id for e in vkv.PromptStore(tmp_path / "other").ls()] == [entry.id]
    ran = run("store", "pull", entry.id, "-o", tmp_path / "a.vkv")
    assert ran.out.startswith(f"{tmp_path / 'a.vkv'}: {entry.tokens} tokens")
    assert (tmp_path / "a.vkv").read_bytes() == saved.read_bytes()


def test_pull_names_what_comes_with_it(run, url, tmp_path):
    model, ids = tiny.llama(), []
    for name, count in (("a", 100), ("b", 200)):
        parent = tmp_path / "a.vkv" if name == "b" else None
        options = {"tokens": range(count), "model": model, "parent": parent}
        path = tmp_path / f"{name}.vkv"
        ids.append(vkv.save(path, cache_of(range(count)), **options).id)
    assert run("store", "push", path, "--remote", url).status == 0
    args = ("--remote", url, "--store", tmp_path / "s")
    ran = run("store", "pull", ids[1], *args)
    assert ran.out.splitlines()[1:] == [f"  with {ids[0]}, which it depends on"]
    assert len(run("store", "pull", ids[1], *args).out.splitlines()) == 1, "it is here now"


def test_pull_over_http(run, saved, tmp_path):
    key = vkv.inspect(saved).id
    with servers.web(files={f"/{object_name(key)}": saved.read_bytes()}) as web:
        ran = run("store", "pull", key, "--remote", web.url, "--store", tmp_path / "s")
    assert (ran.status, ran.err) == (0, "")
    assert [e.id for e in vkv.PromptStore(tmp_path / "s").ls()] == [key]


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["push", "x"], 2, "Missing option '--remote' (env var: 'VKV_REMOTE')"),
        (["pull", "x", "y", "--remote", "{url}", "-o", "a.vkv"], 2, "need a directory"),
        (["pull", "ffff", "--remote", "{url}"], 1, "no file with an id that begins with 'ffff'"),
        (["push", "ffff", "--remote", "{url}", "--store", "s"], 1, "no store at "),
        (["push", "x", "--remote", "bucket"], 1, "'bucket' is no URL"),
        (["push", "x", "--remote", "nonsense://x"], 1, "Protocol not known: nonsense"),
        (["ls-remote", "--remote", "http://127.0.0.1:1"], 1, "cannot be reached"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_one_line(run, url, tmp_path, monkeypatch, args, status, words):
    monkeypatch.chdir(tmp_path)
    ran = run("store", *(arg.format(url=url) for arg in args))
    assert (ran.status, ran.out) == (status, "")
    assert words in ran.err
    assert ran.err.count("\n") == 1
