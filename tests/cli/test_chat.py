"""``vkv chat``: lines in, answers out, and a file at the end that goes on from there."""

from __future__ import annotations

import signal

import click
import pytest
from vkv_cli.commands import chat

import vkv
from vkv.caches.chat import SLACK


def talk(run, path, model, *lines, args=()):
    stdin = "".join(f"{line}\n" for line in lines)
    return run("chat", path, "--model", model, "-m", 4, *args, stdin=stdin)


def test_two_turns_are_saved_and_go_on(run, saved, model, tmp_path):
    out = tmp_path / "talk.vkv"
    ran = talk(run, saved, model, "One?", "Two?", args=["--save", out])
    assert ran.status == 0, ran.err
    assert "11 tokens are in the cache" in ran.err
    first, second = vkv.inspect(saved), vkv.inspect(out)
    tokens = vkv.load(out).tokens
    assert tokens[: first.tokens] == vkv.load(saved).tokens
    assert second.tokens > first.tokens + 8
    assert second.codecs == first.codecs
    again = talk(run, out, model, "Three?", f"/save {tmp_path / 'b.vkv'}", "/quit", "never read")
    assert again.status == 0
    sure = len(tokens) - SLACK  # where an answer was cut, its last ids may join with what follows
    assert vkv.load(tmp_path / "b.vkv").tokens[:sure] == tokens[:sure]


def test_answers_are_those_of_generate(run, saved, model):
    words = ["--model", model, "-p", "One?", "-m", 4, "--verbose", "false"]
    assert talk(run, saved, model, "One?").out == run("generate", saved, *words).out


def test_a_bad_line_does_not_end_the_conversation(run, saved, model, tmp_path):
    lines = ["/save", "/nothing", "/save /no/such/folder/a.vkv", "", "One?"]
    ran = talk(run, saved, model, *lines)
    assert ran.status == 0
    assert ran.out.strip()
    assert "no file to save to" in ran.err
    assert "no command /nothing" in ran.err
    assert "/no/such/folder" in ran.err
    assert ran.err.endswith("not saved; /save FILE keeps a conversation\n")


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    run, saved, model, tmp_path, monkeypatch
):
    echo = click.echo

    def interrupted(text="", **options):
        if options.get("nl") is False and text != " …":
            signal.raise_signal(signal.SIGINT)
        echo(text, **options)

    monkeypatch.setattr(chat.click, "echo", interrupted)
    out = tmp_path / "a.vkv"
    ran = talk(run, saved, model, "One?", "Two?", args=["--save", out])
    assert ran.status == 0, ran.err
    assert ran.out.count(" …") == 2
    assert vkv.validate(out, deep=True).ok
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_prompt_without_a_template(run, model, tmp_path):
    path = tmp_path / "plain.vkv"
    run("save", "--model", model, "-p", "Once", "--ignore-chat-template", "-o", path)
    out = tmp_path / "out.vkv"
    assert talk(run, path, model, " upon a time", args=["--save", out]).status == 0
    loaded = vkv.load(out).tokens
    assert loaded[: vkv.inspect(path).tokens] == vkv.load(path).tokens


@pytest.mark.parametrize("args", [[], ["--model", "/no/such/model"]])
def test_a_model_is_named_and_is_there(run, saved, args):
    assert run("chat", saved, *args).status == 1
