"""Servers of tiny models on a free port of this machine, and questions to them."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest

from fixtures.models import tiny
from vkv.serve import Disk, Server, upstream

SYSTEM = "You are the front desk of a small museum of ships. " * 2
MIN = 32
FIRST, SECOND = "When do you open?", "When do you close, and what is a ticket?"


@pytest.fixture(autouse=True)
def logged():
    """A command line that ran in this process before switched logging off."""
    before = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    yield
    logging.disable(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Directory of a model of ``tiny``, by name; made once."""
    made = {}

    def get(name: str = "llama"):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = tiny.save_dir(tiny.MODELS[name](), tiny.tokenizer(), path)
        return made[name]

    return get


@pytest.fixture(scope="session")
def run_server(model_dir, tmp_path_factory):
    """Run a server of a tiny llama with given flags in a ``with`` block, over a new store."""

    @contextmanager
    def run(flags=(), **options):
        disk = Disk(tmp_path_factory.mktemp("store") / "store", **{"min_tokens": MIN} | options)
        args = upstream.arguments(**{"model": str(model_dir()), "port": 0} | dict(flags))
        server = Server(args, disk)
        try:
            server.start()
            yield server
        finally:
            server.close()

    return run


@pytest.fixture
def serving(model_dir, tmp_path):
    """Run a server in a ``with`` block, over the same store each time."""

    @contextmanager
    def serve(name="llama", *, root=None, flags=(), **options):
        disk = Disk(root or tmp_path / "store", **{"min_tokens": MIN} | options)
        args = upstream.arguments(model=str(model_dir(name)), port=0, **dict(flags))
        server = Server(args, disk)
        try:
            server.start()
            yield server
        finally:
            server.close()

    return serve


def messages(question: str, system: str = SYSTEM) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def post(server: Server, path: str, **body) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = Request(f"{server.url}/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as response:
        return response.read()


class Answer:
    """What came back, from either kind of response."""

    def __init__(self, data: dict):
        self.cached = data["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.prompt = data["usage"]["prompt_tokens"]
        choice = data["choices"][0]
        self.text = choice["message"]["content"] if "message" in choice else choice["text"]
        self.logprobs = [x["logprob"] for x in choice["logprobs"]["content"]]


def ask(server: Server, question: str, system: str = SYSTEM, **options) -> Answer:
    """A chat of a system prompt and one question, answered greedily."""
    options = {"max_tokens": 6, "logprobs": True, "top_logprobs": 1} | options
    data = post(server, "chat/completions", messages=messages(question, system), **options)
    return Answer(json.loads(data))


def tokens(question: str, system: str = SYSTEM) -> list[int]:
    """The prompt that ``ask`` makes."""
    made = tiny.tokenizer().apply_chat_template(
        messages(question, system), add_generation_prompt=True
    )
    return list(made)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
