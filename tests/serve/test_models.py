"""Several models beside each other; adapters; cached tokens that are not told."""

from __future__ import annotations

import json
import re

import pytest

from fixtures.models import tiny
from tests.helpers.http_client import CHAT, TEXT, connect, receive, request_bytes, send
from tests.serve.conftest import FIRST, SECOND, messages
from vkv.errors import VkvError
from vkv.serve import Disk, Server, upstream

BODY = {"messages": messages(FIRST), "max_tokens": 6}


def text(server, **more):
    status, data = send(server.url, CHAT, BODY | more)
    assert status == 200, data
    return json.loads(data)["choices"][0]["message"]["content"]


def test_each_model_answers_for_itself(run_server, model_dir):
    other = str(model_dir("gemma3_text"))
    with run_server({"also_serve": [other]}) as server:
        names = [
            m["id"] for m in json.loads(send(server.url, "/v1/models", method="GET")[1])["data"]
        ]
        loaded = [model.models.model for model in server.models]
        answers = [text(server, model=name) for name in names]
        assert [model.models.model for model in server.models] == loaded
    first = server._args.model
    assert names == [
        first,
        first.rpartition("/")[2],
        "default_model",
        other,
        other.rpartition("/")[2],
    ]
    assert answers == [answers[0]] * 3 + [answers[3]] * 2
    assert answers[0] != answers[3]
    with run_server({"model": other}) as server:
        assert text(server) == answers[3]


def test_two_models_of_one_name(model_dir, tmp_path):
    twin = tiny.save_dir(tiny.llama(seed=1), tiny.tokenizer(), tmp_path / model_dir().name)
    args = upstream.arguments(model=str(model_dir()), port=0, also_serve=[str(twin)])
    server = Server(args, Disk(tmp_path / "store"))
    try:
        with pytest.raises(VkvError, match="two served models are named"):
            server.start()
    finally:
        server.close()


def test_adapters(run_server, tmp_path):
    adapter = tmp_path / "adapter"
    tiny.save_adapter(tiny.with_lora(tiny.llama()), adapter)
    with run_server() as server:
        plain = text(server)
        status, data = send(server.url, CHAT, BODY | {"adapters": str(adapter)})
        assert (status, json.loads(data)["error"]["code"]) == (404, "adapter_not_found")
    with run_server({"adapter_path": str(adapter)}) as server:
        assert text(server) == text(server, adapters=str(adapter)) != plain
        assert send(server.url, CHAT, BODY | {"adapters": "/no/such"})[0] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_may_be_hidden(run_server, stream):
    usage = {"stream": stream, "stream_options": {"include_usage": True}}
    for hidden in (False, True):
        with run_server({"hide_cached_tokens": hidden}) as server:
            send(server.url, CHAT, BODY)
            body = request_bytes(BODY | {"messages": messages(SECOND)} | usage, CHAT)
            answer = receive(connect(server.url, body)).decode()
        cached = int(answer.rpartition('"cached_tokens": ')[2].partition("}")[0])
        assert (cached == 0) is hidden
        assert "keepalive 0/0" in answer or not (stream and hidden)
        assert stream or "keepalive" not in answer


def test_one_fault_of_generation_costs_one_request(run_server, monkeypatch):
    with run_server() as server:
        prompts = server.models[0]._prompts
        fetch = type(prompts).fetch_nearest_cache

        def fail_once(self, *args):
            monkeypatch.setattr(type(prompts), "fetch_nearest_cache", fetch)
            raise MemoryError("no memory left")

        monkeypatch.setattr(type(prompts), "fetch_nearest_cache", fail_once)
        status, data = send(server.url, TEXT, {"prompt": "a", "max_tokens": 2})
        assert (status, json.loads(data)["error"]["message"]) == (
            500, "generation failed: no memory left",
        )  # fmt: skip
        assert send(server.url, TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert not server.failed


def test_a_stopped_server_answers_those_who_wait(run_server):
    body = {"prompt": "a", "max_tokens": 4000, "logit_bias": {"256": -99, "257": -99, "258": -99}}
    with run_server() as server:
        waiting = [
            connect(server.url, request_bytes(body | more))
            for more in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2})
        ]
        while len(server._http.underway) < 3:
            pass
    for answer in [receive(client) for client in waiting]:
        stopped = b" 503 " in answer.splitlines()[0] or b"being stopped" in answer
        # A fast machine may be done with all tokens, or a sample be the last token, before that.
        assert stopped or re.search(rb'"finish_reason": "(length|stop)"', answer)
