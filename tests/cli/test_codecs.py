"""``vkv codecs``: what it lists is what the codecs take."""

from __future__ import annotations

import json

import pytest

from vkv.codecs.options import options, summary
from vkv.codecs.registry import CODECS, newest, parse


@pytest.mark.parametrize("name", newest())
def test_every_option_is_told_and_its_default_is_taken(name):
    codec = CODECS[name, newest()[name]]
    assert summary(codec)
    for option in options(codec):
        assert option.text, option.name
        for value in (option.keys, option.values):
            text = str(value).lower() if option.type == "bool" else str(value)
            parse(f"{name}:{option.name}={text}")


def test_the_list(run):
    out = run("codecs").out
    for name in newest():
        assert f"{name}: " in out
    assert "  bits=4                    Bits per code. One of 2, 3, 4, 5, 6, 8.\n" in out
    assert "Default for values: shared." in " ".join(out.split())
    assert "``" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_json(run):
    found = [json.loads(line) for line in run("codecs", "--json").out.splitlines()]
    assert [codec["codec"] for codec in found] == list(newest())
    step = next(o for c in found if c["codec"] == "tc" for o in c["options"] if o["name"] == "step")
    assert (step["keys"], step["values"], step["type"]) == (0.6, 0.3, "float")
