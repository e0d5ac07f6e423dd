"""The README's Python runs, on a tiny model in place of the one it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fixtures.models import tiny

README = (Path(__file__).parents[1] / "README.md").read_text()
MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"


def test_python_runs_in_order(tmp_path, monkeypatch):
    tiny.save_dir(tiny.llama(head_dim=64), tiny.tokenizer(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"<!-- run -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block.replace(MODEL, str(tmp_path / "model")), scope)
    assert scope["logits"].shape[1] == len(scope["rest"]) >= 1


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", README))))
def test_links_exist(link):
    assert (Path(__file__).parents[1] / link).exists()


def test_every_command_is_named():
    from vkv_cli.main import COMMANDS

    for name in COMMANDS:
        assert f"`vkv {name}`" in README
