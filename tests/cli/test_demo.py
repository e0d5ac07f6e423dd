"""``vkv demo`` on the real model."""

from __future__ import annotations

import pytest

import vkv


@pytest.mark.model
def test_all_checks_hold(run, tmp_path):
    ran = run("demo", "--dir", tmp_path, "--max-tokens", 8, "--json")
    assert ran.status == 0
    scratch, raw, _ = ran.json["attempts"]
    assert raw["tokens"] == scratch["tokens"]
    assert raw["prompt_tokens"]["computed"] < 20 < scratch["prompt_tokens"]["computed"]
    assert all(ran.json["checks"].values())
    assert "ok: greedy: all 8 tokens from raw.vkv are those of the cache that was never" in ran.err
    for name in ("raw.vkv", "affine4.vkv"):
        assert vkv.validate(tmp_path / name, deep=True).ok
