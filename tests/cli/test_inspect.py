"""What ``vkv inspect`` prints."""

from __future__ import annotations

import json

from mlx_lm.models.cache import KVCache

import vkv

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


def test_a_file_from_top_to_bottom(run, files):
    path = files / "affine.vkv"
    info, ran = vkv.inspect(path), run("inspect", path)
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


def test_an_empty_cache(run, tmp_path):
    from mlx_lm.models.cache import KVCache

    vkv.save(tmp_path / "empty.vkv", [KVCache()])
    out = run("inspect", tmp_path / "empty.vkv").out
    assert "\nlayer 0  kv, offset 0\n" in out
    assert "  tokens     not recorded\n" in out
    assert "the parts add up" in out


def test_a_long_value_is_cut(run, tmp_path):
    vkv.save(tmp_path / "a.vkv", [KVCache()], metadata={"long": "x" * 5000})
    out = run("inspect", tmp_path / "a.vkv").out
    assert f"  metadata   long = {'x' * 200}… (5,000 characters)\n" in out
