"""``vkv train-basis``, and the files that stand on what it writes."""

from __future__ import annotations

import json

import pytest
from vkv_cli.commands.train_basis import _places
from vkv_cli.main import main

import vkv
from fixtures.models import tiny

WORDS = "The quick brown fox jumps over the lazy dog. And then it sleeps. "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a text, and a basis trained on it."""
    place = tmp_path_factory.mktemp("basis")
    tiny.save_dir(tiny.llama(head_dim=64), tiny.tokenizer(), place / "model")
    (place / "text.txt").write_text(WORDS * 20)
    args = ["--context", "128", "--probe", "16", "-o", place / "m.basis.vkv", "--meta", "by=me"]
    args = ["train-basis", "--model", place / "model", "--text", place / "text.txt", *args]
    assert main([str(arg) for arg in args]) == 0
    return place


def test_what_it_says(run, place):
    args = ["--context", "128", "--probe", "0", "--windows", "1", "-o", place / "rule.vkv"]
    args = ["train-basis", "--model", place / "model", "--text", place / "text.txt", *args]
    ran = run(*args)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"{place / 'rule.vkv'}: 4 tables, ")
    assert ran.out.endswith("weighed by caches alone: no probe\n")
    assert run(*args, "--json").json == vkv.inspect(place / "rule.vkv").to_dict()


def test_save_inspect_generate_convert(run, place):
    basis, model = place / "m.basis.vkv", place / "model"
    codec = ["--codec", "tc:bits=6", "--basis", basis]
    prompt = ["--prompt", WORDS * 5, "--model", model]
    assert run("save", *prompt, "-o", place / "a.vkv", *codec).status == 0
    info = vkv.inspect(place / "a.vkv")
    assert list(info.dependencies) == [vkv.inspect(basis).id]
    assert (
        f"depends on  {vkv.inspect(basis).id[:12]} (4 tensors)"
        in run("inspect", place / "a.vkv").out
    )
    assert run("validate", "--deep", place / "a.vkv", basis).status == 0
    args = ["--model", model, "-p", " you", "-m", 4, "--json"]
    first = run("generate", place / "a.vkv", *args, "--save", place / "b.vkv", *codec).json
    assert list(first["saved"]["dependencies"]) == list(info.dependencies)
    (place / "alone").mkdir()
    assert run("convert", place / "a.vkv", place / "alone" / "a.vkv", "--inline").status == 0
    assert run("generate", place / "alone" / "a.vkv", *args).json["tokens"] == first["tokens"]
    assert run("convert", place / "alone" / "a.vkv", place / "c.vkv", *codec).status == 0
    assert list(vkv.inspect(place / "c.vkv").dependencies) == list(info.dependencies)


def test_a_basis_shows_as_one(run, place):
    basis = place / "m.basis.vkv"
    assert vkv.inspect(basis).metadata["by"] == "me"
    shown = run("inspect", basis).out
    assert "  tables    4, for other files" in shown
    ran = run("generate", basis, "-p", "Hello", "--model", place / "model")
    assert ran.status == 1
    assert ran.err.endswith("[L9]; run `vkv explain L9`\n")


def test_a_row_more_of_each_setting_of_tc(run, place):
    args = ["--model", place / "model", "--text", place / "text.txt", "--repeat", "1"]
    size = ["--context", "300", "--test", "16"]
    codecs = ["--codecs", "raw tc:bits=4", "--basis", place / "m.basis.vkv"]
    rows = json.loads(run("bench", *args, *size, *codecs, "--json").out)["rows"]
    assert [r["name"] for r in rows] == ["raw", "tc:bits=4", "tc:bits=4 +basis"]
    assert rows[1]["family"] != rows[2]["family"]
    assert rows[2]["quality"]["kl"] > 0


def test_places_are_spread_evenly_and_do_not_overlap():
    ids = list(range(100))
    assert _places(ids, 3, 20) == [ids[:20], ids[40:60], ids[80:]]
    assert _places(ids, 9, 40) == [ids[:40], ids[60:]]
    assert _places(ids, 1, 40) == [ids[:40]]
    assert _places(ids, 2, 200) == [ids]
