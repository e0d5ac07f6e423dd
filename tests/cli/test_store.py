"""``vkv store``: the whole of it on a tiny model."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys

import click
import pytest
from mlx_lm.models.cache import KVCache
from vkv_cli import main as entry
from vkv_cli.commands.store import COMMANDS, store
from vkv_cli.main import main

import vkv
from fixtures.models import tiny
from tests.helpers.stores import cache_of

HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "rich", "huggingface_hub", "safetensors")


@pytest.fixture(scope="session")
def made(model, tmp_path_factory):
    """Files of three prompts, and a store with them."""
    place = tmp_path_factory.mktemp("made")
    for n, prompt in enumerate(("Hello", "Hello, you", "x" * 200)):
        path = str(place / f"{n}.vkv")
        assert main(["save", "--model", str(model), "--prompt", prompt, "-o", path]) == 0
        assert main(["store", "add", path, "--store", str(place / "store")]) == 0
    return place


@pytest.fixture
def kept(run, made, tmp_path):
    """A way to run ``vkv store`` on a copy of that store."""
    shutil.copytree(made / "store", tmp_path / "store")

    def act(command, *args, **options):
        return run("store", command, *args, "--store", tmp_path / "store", **options)

    return act


def ids(act, *args):
    return act("ls", "-q", *args).out.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_of_the_table_is_a_command(name):
    command = store.get_command(click.Context(store), name)
    assert command.name == name
    assert command.help
    for param in command.params:
        assert isinstance(param, click.Argument) or param.help, f"{param.name} says what it does"


@pytest.mark.parametrize("args", [["ls"], ["ls", "--json"], ["stats"], ["-h"], ["rm", "-h"]])
def test_starts_without_the_heavy_modules(kept, tmp_path, args):
    code = (
        "import sys; from vkv_cli.main import main; status = main(['store', *sys.argv[2:]]);"
        "print([m for m in sys.argv[1].split(',') if m in sys.modules], file=sys.stderr);"
        "sys.exit(status)"
    )
    args = args if "-h" in args else [*args, "--store", str(tmp_path / "store")]
    tables = args[0] in ("ls", "stats") and "--json" not in args
    heavy = [name for name in HEAVY if name != "rich" or not tables]
    command = [sys.executable, "-c", code, ",".join(heavy), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_ls(kept, tmp_path):
    lines = kept("ls").out.splitlines()
    assert lines[0].split() == ["ID", "SIZE", "TOKENS", "USED", "CODEC", "MODEL"]
    assert len(lines) == 5
    assert "just now" in lines[1]
    assert lines[-1].startswith("3 entries, ")
    entries = [json.loads(line) for line in kept("ls", "--json").out.splitlines()]
    assert {e["schema_version"] for e in entries} == {1}
    assert [e["id"] for e in entries] == ids(kept)


@pytest.mark.parametrize(
    ("args", "order"),
    [
        ([], [2, 1, 0]),
        (["--sort", "size"], [2, 1, 0]),
        (["--sort", "tokens:asc"], [0, 1, 2]),
        (["--limit", "1"], [2]),
        (["--filter", "size>1GB"], []),
        (["--filter", "tokens<100"], [1, 0]),
        (["--filter", "tokens<100", "--filter", "used<1h", "--sort", "created:asc"], [0, 1]),
        (["--filter", "used>7d"], []),
        (["--filter", "codec=raw"], [2, 1, 0]),
        (["--filter", "uses>0"], []),
        (["--filter", "created<1h"], [2, 1, 0]),
        (["--filter", "model=mode"], [2, 1, 0]),
        (["--filter", "model=odel0"], [2, 1, 0]),
        (["--filter", "model=nobody"], []),
    ],
)
def test_ls_sorts_and_sifts(kept, made, args, order):
    known = [vkv.inspect(made / f"{n}.vkv").id for n in range(3)]
    assert ids(kept, *args) == [known[n] for n in order]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "--sort", "colour"], "'colour' is not one of used, size, created, tokens, uses"),
        (["ls", "--filter", "size"], "'size': expected size, tokens, uses, used"),
        (["ls", "--filter", "size>7x"], "'7x' is not a size like 20GB"),
        (["ls", "--filter", "tokens>abc"], "'abc' is not a number"),
        (["ls", "--filter", "uses>-1"], "'-1' is not a number"),
        (["gc", "--max-bytes", "20XB"], "'20XB' is not a size like 20GB."),
        (["gc", "--max-age", "1y"], "'1y' is not an age like 7d."),
        (["rm"], "Missing argument 'ID...'"),
        (["rm", "abcd"], "not a terminal: pass --yes to confirm."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_status_2(kept, args, message):
    ran = kept(*args)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


def test_get_says_which_and_exports_what_generate_goes_on_from(kept, run, model, tmp_path):
    options = ("--model", model, "--prompt")
    found = kept("get", *options, "Hello, you there", "-o", tmp_path / "out.vkv")
    assert found.out == f"{ids(kept)[1]} covers 16 of 22 tokens\n"
    ran = run("generate", tmp_path / "out.vkv", "--model", model, "-p", " there", "-m", 2)
    assert (ran.status, "16 tokens reused" in ran.err) == (0, True)
    got = kept("get", *options, "-", "--json", stdin="Hello, y").json
    assert got["tokens"] == {"prompt": 14, "covered": 13}
    missing = kept("get", *options, "zzz", "--ignore-chat-template")
    assert (missing.status, missing.out) == (1, "nothing stored begins like these 3 tokens\n")


def test_rm_asks_on_a_terminal(kept, monkeypatch, tmp_path):
    first, *_, last = ids(kept)
    assert kept("rm", first, "--dry-run").out.startswith("would remove 1 entry, ")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for answer, status, left in (("n\n", 130, 3), ("y\n", 0, 2)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert main(["store", "rm", first, "--store", str(tmp_path / "store")]) == status
        assert len(ids(kept)) == left
    assert kept("rm", "-y", last[:8]).out.startswith("removed 1 entry, ")
    assert kept("rm", "-y", last).err == f"vkv: error: no entry with id {last}\n"


def test_pin_and_gc(kept):
    key = ids(kept)[0]
    assert kept("pin", key[:6]).out.startswith("pinned 1 entry, ")
    assert f"{key[:12]} (pinned)" in kept("ls").out
    said = kept("gc", "--max-bytes", "1kB", "--dry-run").out.splitlines()[-2:]
    assert said[0].startswith("would remove 2 entries, ")
    assert re.match(r"still .* over the limit: the rest is pinned or needed", said[1])
    found = kept("gc", "--max-bytes", "1kB", "--json").json
    assert (found["freed"] > 0, found["over"] > 0) == (True, True)
    assert ids(kept) == [key]
    assert "over the limit" not in kept("gc", "--max-bytes", "1GB").out
    assert kept("unpin", key).status == 0
    assert kept("gc", "--max-age", "0s").out.splitlines()[-1].startswith("removed 1 entry, ")


def test_verify_stats_reindex_export(kept, tmp_path):
    root = tmp_path / "store"
    assert kept("verify", "--deep").out == f"{root}: ok\n"
    assert kept("stats", "--json").json["entries"] == 3
    assert kept("stats").out.splitlines()[1].split()[:2] == ["entries", "3,"]
    assert kept("reindex").out == f"{root}: 3 entries\n"
    key = ids(kept)[0]
    assert kept("export", key[:9], tmp_path / "e.vkv").out.startswith(f"{tmp_path}/e.vkv: ")
    assert (tmp_path / "e.vkv").read_bytes() == (root / f"objects/{key[:2]}/{key}.vkv").read_bytes()
    (root / f"objects/{key[:2]}/{key}.vkv").unlink()
    ran = kept("verify")
    assert ran.status == 1
    assert ran.out.splitlines()[0].startswith(f"error: {key}: no file, expected ")
    assert ran.out.splitlines()[1] == f"{root}: 1 finding"
    assert kept("verify", "--json").json["ok"] is False


@pytest.fixture
def grown(run, tmp_path):
    """A store of one entry that depends on another, and the other's id first."""
    place = tmp_path / "grown"
    place.mkdir()
    model = tiny.llama()
    for name, count in (("a", 100), ("b", 200)):
        parent = place / "a.vkv" if name == "b" else None
        cache = cache_of(range(count))
        path = place / f"{name}.vkv"
        vkv.save(path, cache, tokens=range(count), model=model, parent=parent)
        assert run("store", "add", path, "--store", place / "store").status == 0
    return place, [vkv.inspect(place / f"{name}.vkv").id for name in "ab"]


def test_what_others_depend_on_stays_and_is_said(run, grown):
    place, (base, _) = grown
    for flag, words in (("--dry-run", "would remove"), ("-y", "removed")):
        said = run("store", "rm", flag, base, "--store", place / "store").out
        assert said.startswith(f"{words} 1 entry, ")
        assert re.search(r"freed? 0 bytes; .* stay: others depend on them\n", said)
    footer = run("store", "ls", "--store", place / "store").out.splitlines()[-1]
    assert re.match(r"1 entry, .* kept only because others depend on them", footer)


def test_verify_removes_what_is_damaged_and_what_depends_on_it(run, grown, caplog):
    place, (base, top) = grown
    (path,) = place.glob(f"store/objects/*/{base}.vkv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    args = ("--store", place / "store")
    assert run("store", "verify", *args).out.endswith(": 1 finding\n")
    assert len(ids(lambda *a: run("store", *a, *args))) == 2, "looking removes nothing"
    ran = run("store", "verify", "--remove", *args)
    assert ran.status == 1
    assert {*ran.out.splitlines()[2:]} == {f"removed {base}", f"removed {top}"}
    assert caplog.messages[0].endswith(f"; with it what depends on it: {top}")
    assert run("store", "verify", *args).out == f"{place / 'store'}: ok\n"


def test_the_same_content_is_one_entry_and_add_says_so(run, grown):
    place, (_, top) = grown
    vkv.convert(place / "b.vkv", place / "whole.vkv", inline=True)
    ran = run("store", "add", place / "whole.vkv", "--store", place / "store")
    key = vkv.inspect(place / "whole.vkv").id
    assert key != top
    assert f"{top}, 200 tokens (was here; of the same content as {key[:12]})" in ran.out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.vkv", "s3://bucket/a.vkv"])
def test_urls_are_only_read(kept, url):
    ran = kept("add", url)
    assert (ran.status, "only files are added; `vkv store pull`" in ran.err) == (1, True)
    for ran in (kept("export", "abcd", url), kept("pull", "abcd", "--remote", url, "-o", url)):
        assert (ran.status, ran.out) == (2, "")
        assert f"{url.partition('//')[0]}//… is a URL, which can only be read" in ran.err


def test_add_says_what_is_wrong(kept, made, tmp_path):
    vkv.save(tmp_path / "bare.vkv", [KVCache()])
    ran = kept("add", tmp_path / "bare.vkv", made / "0.vkv")
    assert ran.status == 1
    assert "bare.vkv: the file names no model, so no prompt can be matched" in ran.err
    assert len(ran.out.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [["ls"], ["stats"], ["verify"], ["gc"], ["reindex"], ["rm", "-y", "abcd"], ["pin", "abcd"]],
    ids=lambda args: args[0],
)
def test_a_store_that_is_not_there(run, tmp_path, args):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name, words in (("nosuch", "no store at"), ("folder", "no store at"), ("file", "a file")):
        ran = run("store", *args, "--store", tmp_path / name)
        assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert words in ran.err
        assert str(tmp_path / name) in ran.err
    assert not (tmp_path / "nosuch").exists()


def test_no_default_store_yet(run, tmp_path, monkeypatch):
    monkeypatch.setenv("VKV_CACHE_DIR", str(tmp_path / "none"))
    assert (run("store", "ls").status, run("store", "gc").status) == (0, 0)
    assert run("store", "verify").err == f"vkv: error: no store at {tmp_path}/none/store\n"
    assert not (tmp_path / "none").exists()


def test_it_is_in_the_table():
    assert entry.cli.get_command(click.Context(entry.cli), "store") is store


def test_show_and_filters_by_name_and_tag(run, tmp_path):
    root, model = tmp_path / "named", tiny.llama()
    with vkv.PromptStore(root) as store:
        cache = cache_of(range(9))
        entry = store.put(cache, range(9), model=model, name="rules", tags=["faq", "v1"])
        store.put(cache_of(range(5)), range(5), model=model)
    for key in ("rules", entry.id[:8]):
        said = run("store", "show", key, "--store", str(root)).out
        assert entry.id in said
        assert "faq, v1" in said
    for test in ("name=rule", "tag=faq"):
        said = run("store", "ls", "-q", "--filter", test, "--store", str(root)).out
        assert said.split() == [entry.id]


def test_a_store_below_a_missing_folder_is_made_when_that_is_asked_for(run, tmp_path):
    vkv.save(tmp_path / "a.vkv", cache_of(range(9)), tokens=range(9), model=tiny.llama())
    command = ["store", "add", str(tmp_path / "a.vkv"), "--store", str(tmp_path / "x" / "s")]
    assert "pass parents=True (--parents)" in run(*command).err
    assert not (tmp_path / "x").exists()
    assert run(*command, "--parents").status == 0
    assert len(vkv.PromptStore(tmp_path / "x" / "s")) == 1
