"""``vkv bench`` on a tiny model, from the command line."""

from __future__ import annotations

import json

from vkv_cli.main import main

from fixtures.models import tiny


def test_table_files_and_zero(tmp_path, capsys):
    tiny.save_dir(tiny.llama(head_dim=64), tiny.tokenizer(), tmp_path / "model")
    args = ["--model", str(tmp_path / "model"), "--context", "96", "--test", "16", "--repeat", "1"]
    codecs = ["--codecs", "raw affine:bits=4", "-o", str(tmp_path / "out")]
    assert main(["bench", *args, *codecs]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("codec")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [(r["name"], r["quality"]["kl"] == 0) for r in rows] == [
        ("raw", True),
        ("affine:bits=4", False),
    ]
    assert (tmp_path / "out" / "kl.png").exists()


def test_no_runs_are_refused(capsys):
    assert main(["bench", "--model", "m", "--repeat", "0"]) == 2
