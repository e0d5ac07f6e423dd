"""``vkv codecs``: what it lists is what the codecs take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vkv_cli.commands.codecs import GUIDE

from vkv.codecs.registry import newest


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_to_choose_from(run, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    out = run("codecs").out
    assert max(map(len, out.splitlines())) <= width
    assert {line.split()[0] for line in out.splitlines() if line[0].islower()} == set(newest())
    assert len(out.splitlines()) <= 24


def test_bits_are_those_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert GUIDE.keys() == newest().keys()
    for name, (bits, *_) in GUIDE.items():
        row = next(line for line in rows if line.startswith(f"| `{name}"))
        assert bits in row or name == "tc", name


def test_the_options_of_one(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = run("codecs", *newest()).out
    for name in newest():
        assert f"{name}: " in out
    assert "  bits=4                    Bits per code. One of 2, 3, 4, 5, 6, 8.\n" in out
    assert "Default for values: shared." in " ".join(out.split())
    assert "``" not in out
    assert max(map(len, out.splitlines())) <= 100
    only = run("codecs", "tc").out
    assert only.startswith("tc: ")
    assert "affine: " not in only
    assert run("codecs", "none").status == 2


def test_json(run):
    found = [json.loads(line) for line in run("codecs", "--json").out.splitlines()]
    assert [codec["codec"] for codec in found] == list(newest())
    step = next(o for c in found if c["codec"] == "tc" for o in c["options"] if o["name"] == "step")
    assert (step["keys"], step["values"], step["type"]) == (0.6, 0.3, "float")
