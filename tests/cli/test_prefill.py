"""``vkv prefill``: documents into a store, each once, whatever becomes of the others."""

from __future__ import annotations

import json

import click
import mlx_lm
import pytest
from vkv_cli.progress import progress

import vkv
from vkv.errors import StoreUnavailableError


@pytest.fixture
def folder(tmp_path):
    """Two documents, one that is not UTF-8, an empty one, and a hidden file."""
    place = tmp_path / "texts"
    (place / "more").mkdir(parents=True)
    (place / "a.txt").write_text("A lighthouse.")
    (place / "more" / "b.md").write_text("A keeper.")
    (place / "c.txt").write_bytes(b"caf\xe9")
    (place / "d.txt").write_text(" \n")
    (place / ".hidden").write_text("no document")
    return place


def names(store):
    return sorted(entry.name for entry in vkv.PromptStore(store))


def test_a_folder_is_stored_once(run, model, folder, tmp_path):
    store = tmp_path / "store"
    args = ("prefill", folder, "--model", model, "--store", store, "--system-prompt", "Be kind.")
    ran = run(*args, "--tag", "texts")
    assert ran.status == 1
    assert names(store) == ["a.txt", "more/b.md"]
    assert ran.out.count("computed") == 2
    assert f"{folder / 'c.txt'}: byte 3 is not UTF-8" in ran.err
    assert f"{folder / 'd.txt'}: empty" in ran.err
    (folder / "c.txt").unlink()
    (folder / "d.txt").write_text("A lamp.")
    again = run(*args, "--json")
    assert again.status == 0
    rows = [json.loads(line) for line in again.out.splitlines()]
    assert [(row["name"], row["stored"]) for row in rows] == [
        ("a.txt", "was stored"),
        ("d.txt", "computed"),
        ("more/b.md", "was stored"),
    ]
    assert len(vkv.PromptStore(store)) == 3


def test_a_question_about_a_document_finds_it(run, model, folder, tmp_path):
    run("prefill", folder, "--model", model, "--store", tmp_path / "store")
    loaded, tokenizer = mlx_lm.load(str(model))
    message = {"role": "user", "content": "A lighthouse. Is it lit?"}
    tokens = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    hit = vkv.PromptStore(tmp_path / "store").get(tokens, model=loaded)
    assert hit.entry.name == "a.txt"
    assert tokenizer.decode(tokens[: hit.tokens]).endswith("A lighthouse.")


def test_lines_of_json(run, model, tmp_path):
    rows = ['{"name": "one", "text": "First."}', '{"text": "Second."}', '{"text": 3}', "x", "",
            '{"text": "\\ud800"}', '{"name": 1, "text": "y"}']  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    store = tmp_path / "store"
    ran = run("prefill", tmp_path / "in.jsonl", "--model", model, "--store", store)
    assert ran.status == 1
    assert names(store) == ["2", "one"]
    for line in (3, 4, 6, 7):
        assert f"{tmp_path / 'in.jsonl'}:{line}: " in ran.err
    assert ran.err.endswith("2 documents read, 4 failed\n")


def test_one_that_cannot_be_stored_does_not_end_the_run(run, model, folder, tmp_path, monkeypatch):
    put = vkv.PromptStore.put

    def refusing(self, cache, tokens, *, name, **options):
        if name == "a.txt":
            raise vkv.CacheError("too large")
        return put(self, cache, tokens, name=name, **options)

    monkeypatch.setattr(vkv.PromptStore, "put", refusing)
    store = tmp_path / "store"
    ran = run("prefill", folder, "--model", model, "--store", store)
    assert names(store) == ["more/b.md"]
    assert f"{folder / 'a.txt'}: too large" in ran.err


def test_a_store_that_cannot_be_written_ends_the_run(run, model, folder, tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise StoreUnavailableError("the index is busy")

    monkeypatch.setattr(vkv.PromptStore, "put", refusing)
    ran = run("prefill", folder, "--model", model, "--store", tmp_path / "store")
    assert ran.status == 1
    assert ran.err.count("the index is busy") == 1


def test_lines_appear_while_a_bar_is_shown(monkeypatch, capsys):
    """On a terminal above the bar; where stdout is a pipe, there alone, and whole."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress("working", unit="tokens") as bar:
        bar(1, 2)
        bar.say("to stdout")
        bar.say("to stderr", err=True)
        click.echo("by another")
    out, err = capsys.readouterr()
    assert out == "to stdout\nby another\n"
    assert "to stderr" in err
    assert "to stdout" not in err
