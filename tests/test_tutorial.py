"""The commands of the tutorial run as they stand there, on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fixtures.models import tiny

DOCS = Path(__file__).parents[1] / "docs"


def test_every_command_runs(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("tutorial_run", DOCS / "tutorial_run.py")
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    model = tiny.save_dir(tiny.llama(head_dim=64), tiny.tokenizer(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "tutorial.md").read_text()
    made = tutorial.transcript(page, model)
    strip = tutorial.BLOCK.sub
    assert strip("", made) == strip("", page)
    assert [tutorial.commands(b) for b in tutorial.BLOCK.findall(made)] == [
        tutorial.commands(b) for b in tutorial.BLOCK.findall(page)
    ]
    for block in tutorial.BLOCK.findall(page):  # the page has output, not commands alone
        assert any(not line.startswith("$ ") for line in block.splitlines())
