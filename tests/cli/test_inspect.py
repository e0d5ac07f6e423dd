"""What ``vkv inspect`` prints."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from rich.cells import cell_len

import vkv
from tests.cli.conftest import filled

ROOT = Path(__file__).parents[2]
GOOD = sorted((ROOT / "fixtures" / "v1" / "good").glob("*.vkv"))

BLOCKS = """\
layers 0-1  kv, offset 96
            keys    BF16 (1, 2, 96, 64): affine:bits=4,group=64,scale=BF16
            values  BF16 (1, 2, 96, 64): affine:bits=4,group=64,scale=BF16
layer 2     rotating, offset 96, idx 96, keep 0, max_size 128
            keys    BF16 (1, 2, 96, 64): affine:bits=4,group=64,scale=BF16
            values  BF16 (1, 2, 96, 64): affine:bits=4,group=64,scale=BF16
layer 3     kv, offset 96
            keys    BF16 (1, 2, 96, 80): raw
                    asked for affine:bits=4, stored raw: head dim 80 is not a multiple of group 64
            values  BF16 (1, 2, 96, 80): raw
                    asked for affine:bits=4, stored raw: head dim 80 is not a multiple of group 64
"""


def test_all_layers_from_top_to_bottom(run, files):
    path = files / "affine.vkv"
    info, ran = vkv.inspect(path), run("inspect", "--layers", path)
    assert (ran.status, ran.err) == (0, "")
    title, identity, blocks, account = ran.out.split("\n\n")[0].partition("\n")[::2] + tuple(
        ran.out.split("\n\n")[1:]
    )
    assert title == str(path)
    assert identity.splitlines() == [
        f"  id         {info.id}",
        f"  size       {info.size / 1000:.0f} kB ({info.size:,} bytes)",
        f"  format     {info.header.version}, written by {info.header.producer}",
        "  model      not recorded",
        "  tokenizer  not recorded",
        f"  tokens     96, digest {info.header.tokens.digest.hex()[:16]}",
        "  metadata   model = some/model",
        r"  metadata   odd = a\x1b[31m\n",
    ]
    assert blocks + "\n" == BLOCKS
    check_account(account, info)


def check_account(text, info):
    """Every number of the table is the library's, and the last line its size."""
    *rows, last = text.splitlines()
    head, *cells = (row.split("  ") for row in rows)
    assert [c.strip() for c in head if c] == ["bytes", "all", "keys", "values"]
    found = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in cells}
    total, groups = info.accounting, info.accounting.groups.values()
    assert found.keys().isdisjoint(role for role, count in total.roles.items() if not count)
    for role, count in ((role, count) for role, count in total.roles.items() if count):
        own = [f"{g.roles[role]:,}" for g in groups if g.roles.get(role)]
        assert found.pop(role) == [f"{count:,}", *own]
    bits = [total.bits, *(g.bits for g in groups)]
    assert found == {
        "total": [f"{info.size:,}", *(f"{g.bytes:,}" for g in groups)],
        "bits per element": [f"{b:.3f}" for b in bits],
        "ratio to fp16": [f"{16 / b:.2f}" for b in bits],
    }
    assert last == f"the parts add up to the size of the file, to the byte: {info.size:,}"


def test_json_is_one_line_a_file(run, files):
    paths = [files / "raw.vkv", files / "affine.vkv"]
    lines = run("inspect", "--json", *paths).out.splitlines()
    assert [json.loads(line) for line in lines] == [vkv.inspect(p).to_dict() for p in paths]
    assert all(json.loads(line)["schema_version"] == 1 for line in lines)


def test_quiet_prints_ids_alone(run, files):
    paths = [files / "raw.vkv", files / "affine.vkv"]
    ids = [vkv.inspect(p).id for p in paths]
    assert run("inspect", "-q", *paths).out.splitlines() == ids


def test_a_file_that_cannot_be_read_does_not_hide_the_next(run, files):
    ran = run("inspect", "-q", "none", files / "raw.vkv")
    assert ran.status == 1
    assert ran.out == vkv.inspect(files / "raw.vkv").id + "\n"
    assert ran.err == "vkv: error: none: No such file or directory\n"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.stem)
def test_a_file_is_one_screen(run, path, width, monkeypatch):
    """At most 24 lines of at most the terminal's width, and no number is cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(path.parent)  # a long path of the checkout would be cut
    ran = run("inspect", path.name)
    title, *lines = ran.out.splitlines()
    assert (ran.status, ran.err, title) == (0, "", path.name)
    assert len(lines) <= 23
    assert max(map(cell_len, lines)) <= width
    info = vkv.inspect(path)
    assert f"{info.size:,}" in ran.out or info.size < 1000
    bars = lines[lines.index("") + 1 :]
    counts = [int(line.split("%")[0].rsplit(None, 2)[-2].replace(",", "")) for line in bars]
    assert sum(counts) == info.size


def test_the_worst_file_is_one_screen(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    cache = [filled(KVCache(), dim=d) for d in (64, 80, 96, 112, 128)] + [ArraysCache(9)]
    for i in range(9):
        cache[-1][i] = mx.zeros((1, 4 + i % 3), (mx.float32, mx.float16, mx.int32)[i % 3])
    metadata = {f"key {i} {'x' * 90}": "y" * 900 for i in range(50)}
    codec = {"keys": "affine:bits=4", "values": "nsnquant"}
    vkv.save(tmp_path / "a.vkv", cache, tokens=range(96), codec=codec, metadata=metadata)
    ran = run("inspect", tmp_path / "a.vkv")
    assert ran.status == 0
    assert len(ran.out.splitlines()) <= 24
    assert max(map(cell_len, ran.out.splitlines()[1:])) <= 60
    assert "more, with --layers" in ran.out
    assert "  note" in ran.out


def test_the_screen_of_one_file(run, files, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = files / "affine.vkv"
    info, out = vkv.inspect(path), run("inspect", path).out
    group = info.accounting.groups["keys"]
    assert f"  id        {info.id}\n" in out
    assert "  layers    3 kv, 1 rotating (max_size 128)\n" in out
    assert "  keys      affine 4, 3 layers\n" in out
    assert "            raw, 1 layer" not in out
    assert "  note      asked for affine:bits=4, stored raw: head dim 80" in out
    assert r"model=some/model, odd=a\x1b[31m\n" in out
    assert "  digests   not checked; `vkv validate` does\n" in out
    assert f"{info.accounting.bits:.2f} bits per element" in out
    assert group.bytes


def test_options_are_shown_where_they_are_not_the_default(run, tmp_path):
    for i, codec in enumerate(["affine:bits=4", "affine:bits=8,group=32"]):
        vkv.save(tmp_path / f"{i}.vkv", [filled(KVCache())], tokens=range(96), codec=codec)
    assert "affine 4, 1 layer" in run("inspect", tmp_path / "0.vkv").out
    assert "affine 8, group 32, 1 layer" in run("inspect", tmp_path / "1.vkv").out


def test_ranges_of_options(run):
    out = run("inspect", ROOT / "fixtures/v1/good/rope-segments.vkv").out
    assert "affine 4 to 8, group 32, 1 layer, 2 tokens raw" in out
    assert "=0.0" not in out


def test_several_files_are_a_table(run, files, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ran = run("inspect", files / "raw.vkv", "none", files / "affine.vkv")
    head, *rows, total = ran.out.splitlines()
    assert head.split() == ["FILE", "SIZE", "BITS", "TOKENS", "CODEC", "MODEL"]
    assert all(row.split()[0].endswith(".vkv") for row in rows)
    assert len(rows) == 2
    assert max(map(len, ran.out.splitlines())) <= 60
    assert total.startswith("2 files, ")
    assert (ran.status, ran.err) == (1, "vkv: error: none: No such file or directory\n")


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_for_a_terminal_without_no_color(run, files, monkeypatch, env, coloured):
    for name, value in ({"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"} | env).items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in run("inspect", files / "raw.vkv").out) is coloured
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[" not in run("inspect", files / "raw.vkv").out


def test_how_the_prompt_begins(run, saved, files, other_model):
    out = run("inspect", "--text", saved).out
    assert "  prompt" in out
    assert "Hello" in next(line for line in out.splitlines() if "  prompt" in line)
    ran = run("inspect", "--text", files / "raw.vkv")
    assert ran.status == 1
    assert "pass --tokenizer DIR" in ran.err


def test_an_empty_cache(run, tmp_path):
    from mlx_lm.models.cache import KVCache

    vkv.save(tmp_path / "empty.vkv", [KVCache()])
    out = run("inspect", tmp_path / "empty.vkv").out
    assert "  layers   1 kv\n" in out
    assert "  tokens   not recorded\n" in out
    out = run("inspect", "--layers", tmp_path / "empty.vkv").out
    assert "\nlayer 0  kv, offset 0\n" in out
    assert "the parts add up" in out


def test_a_long_value_is_cut(run, tmp_path):
    vkv.save(tmp_path / "a.vkv", [KVCache()], metadata={"long": "x" * 5000})
    out = run("inspect", "--layers", tmp_path / "a.vkv").out
    assert f"  metadata   long = {'x' * 200}… (5,000 characters)\n" in out
