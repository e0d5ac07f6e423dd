"""What clients send that is wrong: each is told so, and the next one is served."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from tests.helpers.serve_process import Process
from tests.serve.conftest import FIRST, messages
from vkv.serve.generator import MAX_FAULTS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory):
    from vkv.serve import Disk, Server, upstream

    args = upstream.arguments(model=str(model_dir()), port=0)
    server = Server(args, Disk(tmp_path_factory.mktemp("requests") / "store", min_tokens=32))
    server.start()
    yield server
    server.close()


def send(server, path, body=None, *, method="POST", length=None):
    """Status and body; ``body`` is bytes, or what becomes JSON."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.putrequest(method, path)
    if length is not False and method == "POST":
        connection.putheader("Content-Length", len(data) if length is None else length)
    connection.endheaders()
    if method == "POST":
        connection.send(data)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def prompt(text, **others):
    return {"prompt": text, "max_tokens": 2} | others


def templated(options):
    return {"messages": messages(FIRST), "max_tokens": 2, "chat_template_kwargs": options}


def chat(**others):
    return {"messages": messages(FIRST), "max_tokens": 2} | others


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, b"", None),
        (TEXT, b"{", None),
        (TEXT, b"\xff\xfe", None),
        (TEXT, b"[" * 100_000, None),
        (TEXT, [], None),
        (TEXT, {}, "prompt"),
        (TEXT, prompt(""), "prompt"),
        (TEXT, prompt("\ud800"), None),
        (TEXT, prompt(["a", "b"]), "prompt"),
        (TEXT, prompt([1, 2, 3]), "prompt[0]"),
        (TEXT, prompt([]), "prompt"),
        (TEXT, prompt(None), "prompt"),
        (TEXT, prompt("a", max_tokens=-1), "max_tokens"),
        (TEXT, prompt("a", max_tokens=0), "max_tokens"),
        (TEXT, prompt("a", max_tokens=10**30), "max_tokens"),
        (TEXT, prompt("a", max_tokens=10**400), "max_tokens"),
        (TEXT, prompt("a", max_tokens="3"), "max_tokens"),
        (TEXT, prompt("a", logit_bias={"5": float("inf")}), None),
        (TEXT, prompt("a", temperature="hot"), "temperature"),
        (TEXT, prompt("a", stop=[5]), "stop[0]"),
        (TEXT, prompt("a", stop=""), "stop"),
        (TEXT, prompt("a", stop=5), "stop"),
        (TEXT, prompt("a", stop=[["b"]]), "stop[0]"),
        (TEXT, prompt("a", logit_bias={"5": None}), "logit_bias"),
        (TEXT, prompt("a", logit_bias={"99999999999": 1}), "logit_bias"),
        (TEXT, prompt("a", logit_bias=[1]), "logit_bias"),
        (TEXT, prompt("a", logit_bias={"2147483": 1}), "logit_bias"),
        (TEXT, prompt("a", logit_bias={"259": 1}), "logit_bias"),
        (TEXT, prompt("a", logit_bias={"-1": 1}), "logit_bias"),
        (TEXT, prompt("a", repetition_penalty=10**25), "repetition_penalty"),
        (TEXT, prompt("a", repetition_penalty=5e-324), "repetition_penalty"),
        (TEXT, prompt("a", temperature=1e-300), "temperature"),
        (TEXT, prompt("a", temperature=-1), "temperature"),
        (TEXT, prompt("a", top_p=1.5), "top_p"),
        (TEXT, prompt("a", min_p=-0.1), "min_p"),
        (TEXT, prompt("a", top_k=1.5), "top_k"),
        (TEXT, prompt("a", xtc_probability=1.0, xtc_threshold=0.9), "xtc_threshold"),
        (TEXT, prompt("a", n=2), "n"),
        (TEXT, prompt("a", n=True), "n"),
        (TEXT, prompt("a", best_of=3), "best_of"),
        (TEXT, prompt("a", echo=True), "echo"),
        (TEXT, prompt("a", suffix="b"), "suffix"),
        (TEXT, prompt("a", draft_model="org/draft"), "draft_model"),
        (TEXT, prompt("a", num_draft_tokens=3), "num_draft_tokens"),
        (TEXT, prompt("a", stream=True, logprobs=True), "logprobs"),
        (TEXT, prompt("a", stream=True, top_logprobs=2), "top_logprobs"),
        (TEXT, prompt("a", top_logprobs=12), "top_logprobs"),
        (TEXT, prompt("a", stop=["x"] * 17), "stop"),
        (TEXT, prompt("a", tempperature=1), "tempperature"),
        (TEXT, prompt("a", stream_options={"include": True}), "stream_options.include"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chat(tool_choice="required"), "tool_choice"),
        (CHAT, chat(functions=[{"name": "f"}]), "functions"),
        (CHAT, chat(reasoning_effort="high"), "reasoning_effort"),
        (CHAT, chat(role_mapping={"user": "x"}), "role_mapping"),
        (CHAT, chat(tools=["f"]), "tools[0]"),
        (TEXT, prompt("a", temperature=float("nan")), None),
        (TEXT, prompt("a", top_logprobs=True), "top_logprobs"),
        (TEXT, prompt("a", stream=True, stream_options=5), "stream_options"),
        (TEXT, prompt("a", seed="x"), "seed"),
        (TEXT, prompt("a", seed=-1), "seed"),
        (TEXT, prompt("a", seed=2**63), "seed"),
        (TEXT, prompt("a", seed=10**30), "seed"),
        (TEXT, prompt("a", model=5), "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (CHAT, templated(5), "chat_template_kwargs"),
        (CHAT, templated({"chat_template": ENDLESS}), "chat_template_kwargs.chat_template"),
        (CHAT, templated({"chat_template": None}), "chat_template_kwargs.chat_template"),
        (CHAT, templated({"tokenize": False}), "chat_template_kwargs.tokenize"),
        (
            CHAT,
            templated({"padding": "max_length", "max_length": 10**12}),
            "chat_template_kwargs.max_length",
        ),
        (CHAT, templated({"tools": []}), "chat_template_kwargs.tools"),
    ],
)
def test_what_is_wrong_is_told_and_costs_nobody_else(server, path, body, param):
    status, data = send(server, path, body)
    error = json.loads(data)["error"]
    assert status == 400
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    status, data = send(server, TEXT, prompt("a"))
    assert (status, json.loads(data)["usage"]["completion_tokens"]) == (200, 2)
    assert not server.failed


@pytest.mark.parametrize(
    "others",
    [
        {"top_k": 10**9},
        {"top_k": 100, "seed": 1},
        {"max_tokens": None},
        {"stream": True, "stream_options": {}},
        {"stop": ["x"], "logit_bias": {"5": 1}},
        {"model": "default_model"},
    ],
)
def test_what_is_odd_and_right_is_served(server, others):
    others = {"max_tokens": 2} | others
    if others["max_tokens"] is None:
        others["max_completion_tokens"] = 2
    status, data = send(server, TEXT, {"prompt": ["a"]} | others)
    assert (status, b"error" in data) == (200, False)
    assert data


SENT = {
    "adapters": None, "best_of": 1, "draft_model": "default_model", "echo": False,
    "frequency_context_size": None, "frequency_penalty": None, "logit_bias": None,
    "logprobs": None, "max_completion_tokens": None, "metadata": {"a": "b"}, "min_p": None,
    "model": None, "n": 1, "num_draft_tokens": None, "presence_context_size": None,
    "presence_penalty": None, "prompt_cache_key": "k", "repetition_context_size": None,
    "repetition_penalty": None, "response_format": {"type": "text"}, "safety_identifier": "s",
    "seed": None, "service_tier": "auto", "stop": None, "store": False, "stream": None,
    "stream_options": None, "suffix": None, "temperature": None, "top_k": None,
    "top_logprobs": None, "top_p": None, "user": "u", "xtc_probability": None,
    "xtc_threshold": None,
}  # fmt: skip


def test_null_and_what_asks_for_nothing_change_nothing(server):
    plain = json.loads(send(server, TEXT, prompt("a"))[1])
    status, data = send(server, TEXT, prompt("a", **SENT))
    assert status == 200
    assert json.loads(data)["choices"] == plain["choices"]
    for name in SENT:
        assert send(server, TEXT, prompt("a", **{name: None}))[0] == 200, name
    assert send(server, TEXT, prompt("a", max_tokens=None, max_completion_tokens=2))[0] == 200


def test_tools_may_be_switched_off(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for choice in ("none", "auto", None):
        assert send(server, CHAT, chat(tools=tools, tool_choice=choice))[0] == 200


def test_a_prompt_beyond_the_context(server):
    status, data = send(server, TEXT, prompt("a" * 5000))
    assert (status, json.loads(data)["error"]["code"]) == (400, "context_length_exceeded")
    status, data = send(server, TEXT, prompt("a" * 4092, max_tokens=99, logit_bias=NO_END))
    choice = json.loads(data)
    assert (status, choice["choices"][0]["finish_reason"]) == (200, "length")
    assert choice["usage"]["total_tokens"] == 4096


#: Tokens that end an answer of the tiny models.
NO_END = {"256": -1000, "257": -1000, "258": -1000}


def test_what_the_template_takes_is_passed_on(server):
    for options in (None, {}, {"enable_thinking": False}):
        assert send(server, CHAT, templated(options))[0] == 200


@pytest.mark.parametrize(
    ("length", "status"), [(False, 411), ("x", 400), ("-1", 400), ("9" * 30, 413), ("²", 400)]
)
def test_lengths(server, length, status):
    length = length.encode() if length == "²" else length
    found, data = send(server, TEXT, prompt("a"), length=length)
    assert (found, json.loads(data)["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/nothing"), ("GET", "/"), ("GET", "/v1/models/nobody")]
)
def test_other_places(server, method, path):
    status, data = send(server, path, prompt("a"), method=method)
    assert (status, json.loads(data)["error"]["type"]) == (404, "invalid_request_error")


def test_models_and_their_names(server):
    status, data = send(server, "/v1/models", method="GET")
    names = [model["id"] for model in json.loads(data)["data"]]
    given = server._args.model
    assert (status, names) == (200, [given, given.rpartition("/")[2], "default_model"])
    for name in names:
        status, data = send(server, TEXT, prompt("a", model=name))
        assert (status, json.loads(data)["model"]) == (200, name)
    assert json.loads(send(server, f"/v1/models/{names[1]}", method="GET")[1])["id"] == names[1]


@pytest.mark.parametrize("name", ["/no/such/model", "gpt-4o", "", "a\0b", "x" * 9999])
def test_a_model_that_is_not_there(server, name):
    before = server.models[0].models.model
    status, data = send(server, TEXT, prompt("a", model=name))
    error = json.loads(data)["error"]
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"].startswith(f"model {name[:200]!r} is not served; served is ")
    assert server._args.model.rpartition("/")[2] in error["message"]
    assert server.models[0].models.model is before, "a typing error unloads nothing"
    assert send(server, TEXT, prompt("a"))[0] == 200


DYING = """
import sys
from vkv.serve.prompts import StoredPrompts
from vkv_cli.main import main

def fail(self, model, tokens):
    raise MemoryError("no memory left")

StoredPrompts.fetch_nearest_cache = fail
sys.exit(main())
"""


def test_repeated_faults_of_generation_are_told_and_end_the_process(model_dir, tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    flags = ("--model", model_dir(), "--store", tmp_path / "store")
    with Process(tmp_path, *flags, script=script) as server:
        answers = [send(server, TEXT, prompt("a")) for _ in range(MAX_FAULTS)]
        assert server.process.wait(60) == 1
    for status, data in answers:
        error = json.loads(data)["error"]
        assert (status, error["type"]) == (500, "server_error")
        assert "no memory left" in error["message"]
