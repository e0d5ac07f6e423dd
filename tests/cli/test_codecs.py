"""``vkv codecs``: what it lists is what the codecs take."""

from __future__ import annotations

import json

from vkv.codecs.registry import newest


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
