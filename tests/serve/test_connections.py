"""Slow, silent and vanishing clients do not delay the others."""

from __future__ import annotations

import http.client
import json
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.helpers.http_client import CHAT, TEXT, connect, receive, request_bytes, send
from tests.serve.conftest import messages
from vkv.serve import connections, handler

SHORT = {"prompt": "a", "max_tokens": 2}
#: A seed at a temperature: computed alone, for minutes.
LONG = {"prompt": "a", "max_tokens": 1_000_000, "temperature": 1.0, "seed": 1,
        "logit_bias": {"257": -1000, "258": -1000, "256": -1000}}  # fmt: skip


@pytest.fixture(scope="module")
def server(run_server):
    with run_server({"max_context": 10_000_000}) as server:
        yield server


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def still_open(client):
    """Send one more header line, every 50 ms."""
    time.sleep(0.05)
    try:
        client.sendall(b"X: y\r\n")
    except OSError:
        return False
    return True


def test_expect_is_answered_at_once(server):
    client = connect(server.url, request_bytes(b"", extra="Expect: 100-continue\r\n", length=33))
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(json.dumps(SHORT).encode().ljust(33))
    assert receive(client).startswith(b"HTTP/1.0 200 OK")


def test_expect_of_a_refused_request_is_no_continue(server):
    body = request_bytes(b"", "/nothing", extra="Expect: 100-continue\r\n", length=33)
    assert receive(connect(server.url, body)).startswith(b"HTTP/1.0 404 ")


def test_a_refused_body_is_not_read_and_the_answer_arrives(server):
    url = urlsplit(server.url)
    client = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    headers = {"Content-Type": "application/json", "Host": "evil.example"}
    client.request("POST", TEXT, b" " * (8 << 20), headers)
    assert client.getresponse().status == 403
    client.close()


def test_a_request_that_never_arrives_ends(server, monkeypatch):
    monkeypatch.setattr(handler, "READ", 0.5)
    start = time.monotonic()
    clients = [
        connect(server.url, data) for data in (b"", b"POST /v1/comp", request_bytes(b"", length=9))
    ]
    answers = [receive(client) for client in clients]
    assert time.monotonic() - start < 10
    assert answers[:2] == [b"", b""]
    assert answers[2].startswith(b"HTTP/1.0 408 ")


def test_a_client_that_sends_byte_by_byte_has_no_more_time(server, monkeypatch):
    monkeypatch.setattr(handler, "READ", 0.5)
    start = time.monotonic()
    with connect(server.url, b"POST / HTTP/1.1\r\n") as client:
        wait_for(lambda: not still_open(client), 10)
    assert time.monotonic() - start >= 0.4


def test_those_who_send_the_longest_make_room(server, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    slow = [connect(server.url, request_bytes(b"", length=99)) for _ in range(12)]
    assert send(server.url, TEXT, SHORT)[0] == 200
    for client in slow:
        client.close()


def test_at_the_limit_of_descriptors_accepting_pauses(server, monkeypatch):
    """The limit is pretended: all numbers count as high."""
    monkeypatch.setattr(connections, "RESERVED", 10**9)
    monkeypatch.setattr(connections, "SPARED", 10**9)
    first = connect(server.url, request_bytes(b"", length=99))
    wait_for(lambda: server._http.connections.full())
    second = connect(server.url, request_bytes(SHORT))
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.5, "the loop spins"
    first.close()
    assert receive(second).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_a_client_that_leaves_stops_its_request(server, stream, alone):
    body = LONG | {"stream": stream} | ({} if alone else {"seed": None})
    client = connect(server.url, request_bytes(body))
    generators = server.models[0]._generators
    wait_for(lambda: any(x._context for g in generators for x in g._queue._open if not x.cancelled))
    client.close()
    wait_for(lambda: not server._http.underway)
    start = time.monotonic()
    assert send(server.url, TEXT, LONG | {"max_tokens": 2})[0] == 200
    assert send(server.url, TEXT, SHORT)[0] == 200
    assert time.monotonic() - start < 20


def test_a_request_that_waits_in_line_is_dropped_with_its_client(server):
    first = connect(server.url, request_bytes(LONG))
    second = connect(server.url, request_bytes(LONG))
    wait_for(lambda: len(server._http.underway) == 2)
    second.close()
    wait_for(lambda: len(server._http.underway) == 1)
    first.close()
    assert send(server.url, TEXT, LONG | {"max_tokens": 2})[0] == 200


def test_a_seed_does_not_make_others_wait(server):
    alone = connect(server.url, request_bytes(LONG))
    wait_for(lambda: server._http.underway)
    for name in (None, server._args.model):
        assert send(server.url, TEXT, SHORT | {"model": name}, timeout=20)[0] == 200
    alone.close()
    wait_for(lambda: not server._http.underway)


def test_a_seed_gives_the_same_answer_beside_others(server):
    body = {"messages": messages("Say something."), "max_tokens": 24, "temperature": 1.0}
    ask = lambda **more: json.loads(send(server.url, CHAT, body | more)[1])["choices"][0]  # noqa: E731
    want = ask(seed=5)["message"]["content"]
    others = [threading.Thread(target=ask) for _ in range(4)]
    for thread in others:
        thread.start()
    assert [ask(seed=5)["message"]["content"] for _ in range(3)] == [want] * 3
    assert ask(seed=6)["message"]["content"] != want
    for thread in others:
        thread.join()


def test_a_long_prompt_is_tokenized_beside_the_batch(server, monkeypatch):
    from vkv.serve import large, served_model

    body = {"messages": messages("Say something."), "max_tokens": 4}
    want = json.loads(send(server.url, CHAT, body)[1])
    monkeypatch.setattr(served_model, "LARGE", 1)
    monkeypatch.setattr(large, "LARGE", 1)
    again = json.loads(send(server.url, CHAT, body)[1])
    assert again["choices"] == want["choices"]
    assert again["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert server.models[0]._tokenizer is not None


def test_a_thread_that_no_longer_accepts_does_not_delay_the_end(serving):
    stuck, go = threading.Event(), threading.Event()
    with serving() as server:
        server._http.connections.poll = lambda: (stuck.set(), go.wait(30))
        assert stuck.wait(10)
        start = time.monotonic()
        assert not server.close(1.0)
        assert time.monotonic() - start < 5
        go.set()
