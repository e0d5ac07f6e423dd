"""The Python of README and docs runs, on a tiny model in place of the one it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from fixtures.models import tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")),
]
MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"


def blocks(page: str) -> list[str]:
    """Return the examples of a page that are marked to run."""
    text = (ROOT / page).read_text()
    return re.findall(r"<!-- run -->\n```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)])
def test_python_runs_in_order_after_that_of_the_readme(page, tmp_path, monkeypatch):
    tiny.save_dir(tiny.llama(head_dim=64), tiny.tokenizer(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    first = blocks("README.md")
    scope: dict[str, object] = {}
    for block in [*first, *(blocks(page) if page != "README.md" else [])]:
        exec(block.replace(MODEL, str(tmp_path / "model")), scope)
    assert scope["logits"].shape[1] == len(scope["rest"]) >= 1


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page):
    text = (ROOT / page).read_text()
    links = set(re.findall(r"\]\(((?!http)[^)#]+)", text))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def command_lines(page: str) -> list[str]:
    """Return the command lines of a page that begin with ``$ vkv``; those that go on are joined."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    return re.findall(r"^\$ (vkv .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if command_lines(p)])
def test_command_lines_are_understood(page):
    """Commands and options exist, and have the arguments they need; nothing is run."""
    from vkv_cli.main import cli

    for line in command_lines(page):
        words = shlex.split(line.replace("…", "x"), comments=True)[1:]
        words = words[: words.index("<")] if "<" in words else words
        command, context = cli, click.Context(cli)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, line
        options, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
        assert rest == [], line
        needed = {p.name for p in command.params if p.required and not p.envvar}
        assert {name for name in needed if options.get(name) in (None, ())} == set(), line


def test_every_command_is_named():
    from vkv_cli.main import COMMANDS

    for name in COMMANDS:
        assert f"`vkv {name}`" in README


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert [page for page in PAGES[1:] if page.removeprefix("docs/") not in named] == []
    assert len(set(named)) == len(named)
