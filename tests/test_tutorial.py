"""The commands of the tutorial run; the pictures are as their script draws them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fixtures.models import tiny

DOCS = Path(__file__).parents[1] / "docs"


def script(path):
    """Import a script of the documentation."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_up_to_date(tmp_path, monkeypatch):
    draw = script(DOCS / "pictures" / "draw.py")
    monkeypatch.setattr(draw, "HERE", tmp_path)
    for picture in draw.PICTURES:
        picture()
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}


def test_every_command_runs(tmp_path, monkeypatch):
    tutorial = script(DOCS / "tutorial_run.py")
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
