"""Clients of a server: well-formed, slow, broken, malicious and vanishing ones."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.helpers.http_client import CHAT, TEXT, connect, receive, request_bytes, send

SENTENCES = [f"The {x} of the harbour is {y}. " for x in ("light", "wall") for y in ("red", "old")]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
#: Seconds that a well-formed request may take.
PATIENCE = 120.0


def prompt(rng: random.Random) -> str:
    """Return a text that shares its beginning with that of many others."""
    return "".join(SENTENCES[: rng.randint(1, 4)]) * rng.randint(1, 4) + f"{rng.randint(0, 99)}?"


def well_formed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body that must be answered."""
    chosen = rng.choice(
        [{}, {}, {}, {"temperature": 0.8}, {"temperature": 1.0, "seed": 7}, {"seed": 7},
         {"top_p": 0.9, "temperature": 1.0}, {"stop": ["x"]}, {"logprobs": True}, {"n": 1},
         {"model": "default_model"}, {"top_k": 10**9}]
    )  # fmt: skip
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 12)} | chosen
    if "logprobs" not in body:
        body["stream"] = rng.random() < 0.3
    if rng.random() < 0.5:
        return TEXT, body | {"prompt": prompt(rng)}
    messages = [{"role": "system", "content": prompt(rng)}, {"role": "user", "content": "Hello"}]
    return CHAT, body | {"messages": messages}


def ask_well(url: str, rng: random.Random) -> str:
    """Ask, and return ``"answered"``, or what came instead."""
    path, body = well_formed(rng)
    try:
        status, data = send(url, path, body, timeout=PATIENCE)
    except OSError as exc:
        return f"{type(exc).__name__}: {exc}"
    if status != 200:
        return f"{status}: {data[:200]!r}"
    if body.get("stream"):
        return "answered" if data.endswith(b"data: [DONE]\n\n") else f"cut: {data[-200:]!r}"
    answer = json.loads(data)
    return "answered" if answer["usage"]["completion_tokens"] > 0 else f"empty: {data[:200]!r}"


def ask_slowly(url: str, rng: random.Random) -> str:
    """Send a well-formed request in small pieces over some seconds."""
    path, body = well_formed(rng)
    data = request_bytes(body, path)
    with connect(url, timeout=PATIENCE) as client:
        for at in range(0, len(data), step := max(1, len(data) // 20)):
            client.sendall(data[at : at + step])
            time.sleep(rng.uniform(0, 0.3))
        answer = receive(client)
    return "answered" if answer.startswith(b"HTTP/1.0 200") else f"slow: {answer[:200]!r}"


def ask_and_never_finish(url: str, rng: random.Random) -> str:
    """Announce a body that does not come."""
    with connect(url, request_bytes(b"{", length=rng.randint(2, 10**6))):
        time.sleep(rng.uniform(0, 4))
    return "left"


def ask_and_vanish(url: str, rng: random.Random) -> str:
    """Ask for a long answer, and leave before it ends."""
    path, body = well_formed(rng)
    endless = {"max_tokens": 4000, "logit_bias": {"256": -99, "257": -99, "258": -99}}
    with connect(url, request_bytes(body | endless, path)) as client:
        time.sleep(rng.uniform(0, 1.5))
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
    return "left"


def broken(rng: random.Random) -> bytes:
    """Return bytes that are no request, or one that must be refused."""
    body = {"prompt": "a", "max_tokens": 2}
    choices: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randint(1, 5000)) + b"\r\n\r\n",
        lambda: b"GET /v1/models HTTP/9.9\r\n\r\n",
        lambda: b"BREW /coffee HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        lambda: b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        lambda: request_bytes(b"{" * rng.randint(1, 10**5)),
        lambda: request_bytes(b"[" * 10**5),
        lambda: request_bytes(b'{"prompt": [' + b"[]," * rng.randint(1, 10**6) + b"0]}"),
        lambda: request_bytes(body, length=10**12),
        lambda: request_bytes(body, extra="Transfer-Encoding: chunked\r\n", length=0),
        lambda: request_bytes(body, "/v1/nothing"),
        lambda: request_bytes(body | {"max_tokens": -1}),
        lambda: request_bytes(body | {"max_tokens": 10**4000}),
    ]
    return rng.choice(choices)()


def malicious(rng: random.Random) -> bytes:
    """Return a request that would hurt others if it were taken as it is."""
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
    messages = [{"role": "user", "content": "a"}]
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, body | {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.9}),
        (TEXT, body | {"logit_bias": {"2000000000": 1.0}}),
        (TEXT, body | {"draft_model": "org/draft"}),
        (TEXT, body | {"adapters": "/etc"}),
        (TEXT, body | {"model": "../../etc/passwd"}),
        (TEXT, body | {"temperature": 1e-300}),
        (TEXT, {"prompt": "a" * rng.randint(5000, 300_000), "max_tokens": 2}),
        (CHAT, {"messages": messages, "chat_template_kwargs": {"chat_template": ENDLESS}}),
        (CHAT, {"messages": messages, "chat_template_kwargs": {"padding": "max_length"}}),
        (CHAT, {"messages": [{"role": "user", "content": image}]}),
        (CHAT, {"messages": [{"role": "user", "content": None, "tool_calls": [5]}]}),
    ]
    path, chosen = rng.choice(bodies)
    return request_bytes(chosen, path)


def of_another_site(_: random.Random) -> bytes:
    """Return what a page of another site makes a browser send."""
    data = request_bytes({"prompt": "a", "max_tokens": 2})
    return data.replace(b"Host: localhost", b"Host: localhost\r\nOrigin: https://evil.example")


def refused(make: Callable[[random.Random], bytes]) -> Callable[[str, random.Random], str]:
    """Make a client whose requests must be refused, by a status of 4xx or a closed connection."""

    def ask(url: str, rng: random.Random) -> str:
        answer = b""
        with contextlib.suppress(ConnectionError), connect(url, timeout=PATIENCE) as client:
            client.sendall(make(rng))
            answer = receive(client)
        status = answer[9:12]
        known = status[:1] == b"4" or status in (b"", b"501", b"505")
        return "refused" if known or not answer.startswith(b"HTTP") else f"{answer[:300]!r}"

    return ask
