"""``vkv serve`` as people start and stop it; what it answers is in tests/serve."""

from __future__ import annotations

import re
import signal

import pytest

import vkv
from tests.serve.conftest import FIRST, ask
from tests.serve.process import Process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_flushes_and_ends_well(model, tmp_path, number):
    store = tmp_path / "store"
    flags = ("--model", model, "--store", store, "--codec", "affine:bits=8,group=32")
    with Process(tmp_path, *flags, "--min-tokens", 32) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert str(store) in server.log()
        prompt = ask(server, FIRST).prompt
        assert server.end(number) == 0
        assert "Traceback" not in server.log()
        assert re.search(r"closing: finishing \d writes?…", server.log())
    entries = vkv.PromptStore(store).ls()
    assert max(e.tokens for e in entries) >= prompt - 1
    assert all(e.codec.startswith("affine") for e in entries)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/no/such/model"], "cannot load model '/no/such/model'"),
        (["--model", "m", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8080"),
        (["--model", "m", "--codec", "nope"], "unsupported codec 'nope'"),
        (["--model", "m", "--max-bytes", "much"], "'much' is not a size like 20GB"),
    ],
)
def test_errors_are_one_line(run, flags, words, tmp_path):
    ran = run("serve", *flags, "--store", tmp_path / "store", "--log-level", "CRITICAL")
    assert ran.status == 1
    assert ran.err.startswith("vkv: error: ")
    assert words in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--chat-template-args", "{"],
        ["--chat-template-args", "[]"],
        ["--prompt-cache-bytes", "x"],
        ["--port", "99999"],
        ["--port", "-1"],
    ],
)
def test_wrong_usage(run, flags):
    ran = run("serve", "--model", "m", *flags)
    assert (ran.status, ran.out) == (2, "")
