"""``vkv serve`` as people start and stop it; what it answers is in tests/serve."""

from __future__ import annotations

import re
import signal
import time

import pytest

import vkv
from tests.helpers.http_client import connect, receive, request_bytes
from tests.helpers.serve_process import Process
from tests.serve.conftest import FIRST, ask

#: Keeps the tokens that end an answer of the tiny models out of it.
NO_END = {"256": -1000, "257": -1000, "258": -1000}


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


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 1}], ids=["batched", "alone"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_sigterm_ends_an_answer_that_runs(model, tmp_path, more, stream):
    body = {"prompt": "a", "max_tokens": 10**8, "stream": stream, "logit_bias": NO_END} | more
    flags = ("--model", model, "--store", tmp_path / "store", "--max-context", 10**9)
    with Process(tmp_path, *flags, "--log-level", "DEBUG") as server:
        client = connect(server.url, request_bytes(body))
        server.wait_for("Starting ")
        start = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - start < 5
    assert b"the server is being stopped" in receive(client)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/no/such/model"], "cannot load model '/no/such/model'"),
        (["--model", "m", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8080"),
        (["--model", "m", "--codec", "nope"], "unsupported codec 'nope'"),
    ],
)
def test_errors_are_one_line(run, flags, words, tmp_path):
    ran = run("serve", *flags, "--store", tmp_path / "store", "--log-level", "CRITICAL")
    assert ran.status == (2 if "--codec" in flags else 1)
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
        ["--prefill-step-size", "0"],
        ["--prompt-concurrency", "0"],
        ["--decode-concurrency", "-1"],
        ["--max-tokens", "0"],
        ["--max-tokens", "99999999999"],
        ["--top-p", "5"],
        ["--top-p", "nan"],
        ["--temp", "-1"],
        ["--temp", "inf"],
        ["--min-p", "2"],
        ["--top-k", "-1"],
        ["--kv-bits", "7"],
        ["--kv-group-size", "48"],
        ["--prompt-cache-size", "0"],
        ["--max-context", "1"],
        ["--min-tokens", "0"],
        ["--stop-seconds", "-1"],
        ["--stop-seconds", "nan"],
        ["--max-bytes", "much"],
    ],
)
def test_wrong_usage(run, flags):
    ran = run("serve", "--model", "m", *flags)
    assert (ran.status, ran.out) == (2, "")
