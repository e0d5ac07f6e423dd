"""A real model behind the openai client: killed and started again, it still knows its prompt."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.helpers.serve_process import Process
from vkv.demo.model import smollm2

pytestmark = pytest.mark.model

SYSTEM = (Path(__file__).parents[2] / "fixtures" / "text" / "prose.txt").read_text()[:1600]
QUESTION = "Who is speaking here?"


@dataclass
class Reply:
    text: str
    prompt: int
    cached: int
    first: float


def ask(url: str) -> Reply:
    """One streamed answer; ``first`` is the seconds to its first token."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    start, first, text = time.perf_counter(), 0.0, ""
    with (
        OpenAI(base_url=url, api_key="none") as client,
        client.chat.completions.create(
            model="default_model",
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        for chunk in stream:
            for choice in chunk.choices:
                first = first or time.perf_counter() - start
                text += choice.delta.content or ""
    usage = chunk.usage
    return Reply(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, first)


def test_a_prompt_survives_the_server(tmp_path):
    flags = ("--model", smollm2(), "--store", tmp_path / "store")
    with Process(tmp_path, *flags) as server:
        first, again = ask(server.url), ask(server.url)
        server.wait_for("tokens stored as")
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with Process(tmp_path, *flags) as server:
        after = ask(server.url)
        assert server.end() == 0
    print(f"first {first}\nagain {again}\nafter {after}")
    assert first.text == again.text == after.text
    assert (first.cached, again.cached) == (0, again.prompt - 1)
    assert after.prompt - 32 < after.cached < after.prompt
