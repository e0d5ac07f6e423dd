"""Models whose caches cannot be cut reuse a prompt up to the last common message."""

from __future__ import annotations

import json
import signal
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import vkv
from fixtures.models import tiny
from tests.helpers.serve_process import Process
from tests.serve.conftest import SYSTEM, Answer, common, post
from vkv.caches.checkpoints.record import checkpoints_of
from vkv.serve.read_points import MESSAGE, ReadPoints, _split, divided
from vkv.serve.writer import Job

TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "When do you open, and on which days of the week?"},
    {"role": "assistant", "content": "At nine in the morning, on every day but Monday."},
    {"role": "user", "content": "And what is a ticket for two adults and a child?"},
]
EDITED = [*TALK[:3], {"role": "user", "content": "May I bring my dog?"}]
OTHER = [TALK[0], {"role": "user", "content": "Which is your oldest ship?"}]

hybrids = pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])


def ids_of(messages) -> list[int]:
    return list(tiny.tokenizer().apply_chat_template(messages, add_generation_prompt=True))


def asked(server, messages) -> Answer:
    options = {"max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    return Answer(json.loads(post(server, "chat/completions", messages=messages, **options)))


def end_of(messages) -> int:
    """Tokens up to the end of the last of some messages, as the template closes it."""
    made = tiny.tokenizer().apply_chat_template(messages, add_generation_prompt=False)
    return common(list(made), ids_of(TALK))


@hybrids
def test_after_a_restart_up_to_the_last_common_message(serving, name, caplog):
    with serving(name) as server:
        first = asked(server, TALK)
        assert first.cached == 0
    caplog.set_level("DEBUG", "vkv.serve")
    with serving(name, write=False) as server:
        again, edited, other = (asked(server, m) for m in (TALK, EDITED, OTHER))
    assert again.cached == len(ids_of(TALK)) - 1
    np.testing.assert_allclose(again.logprobs, first.logprobs, rtol=1e-3, atol=1e-4)
    assert edited.cached >= end_of(TALK[:3])
    assert other.cached >= end_of(TALK[:1])
    assert f"checkpoint after {edited.cached} of its" in caplog.text
    if name != "gemma3_text":
        return
    with serving(name, write=False, root="/nonexistent/store") as server:
        for messages, found in ((EDITED, edited), (OTHER, other)):
            want = asked(server, messages)
            np.testing.assert_allclose(found.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)


def test_a_conversation_keeps_the_points_of_its_earlier_turns(serving):
    """The second turn begins with what was loaded, and is stored with the points of that."""
    name, longer = "lfm2", [
        *TALK, {"role": "assistant", "content": "Eleven pounds, and the child is free."},
        {"role": "user", "content": "Do you have a leaflet with all of that in it?"},
    ]  # fmt: skip
    with serving(name) as server:
        asked(server, TALK)
    with serving(name) as server:
        assert asked(server, longer).cached >= end_of(TALK[:3])
    with serving(name, write=False) as server:
        newest = max(server.disk.store.ls(), key=lambda e: e.tokens)
        points = vkv.inspect(newest.path).checkpoints
        assert len(points) >= 2
        assert all(point["message"] for point in points)
        assert asked(server, [*longer[:5], TALK[3]]).cached >= len(ids_of(longer)) - 80


@pytest.mark.slow
def test_after_a_kill(model_dir, serving, tmp_path):
    root = tmp_path / "store"
    args = ("--model", model_dir("gemma3_text"), "--store", root, "--min-tokens", 32)
    with Process(tmp_path, *args) as process:
        first = asked(process, TALK)
        store = vkv.PromptStore(root)
        deadline = time.monotonic() + 60
        while not any(e.tokens >= first.prompt - 1 for e in store.ls()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.end(signal.SIGKILL)
    with serving("gemma3_text", root=root) as server:
        assert asked(server, EDITED).cached >= end_of(TALK[:3])
        assert asked(server, OTHER).cached >= end_of(TALK[:1])


def test_a_model_that_can_be_cut_is_read_as_before():
    request = SimpleNamespace(request_type="chat", messages=TALK, tools=None)
    ids = ids_of(TALK)
    tokenized = (ids, [ids], ["user"], "normal")
    tokenizer = TokenizerWrapper(tiny.tokenizer())
    assert divided(tokenized, tokenizer, tiny.llama(), request, {}) is tokenized
    _, segments, types, state = divided(tokenized, tokenizer, tiny.MODELS["lfm2"](), request, {})
    assert types == [*[MESSAGE] * (len(segments) - 1), "user"]
    assert (len(segments) > 3, state) == (True, "normal")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], [(4, "system"), (10, "user")]),
        ([2, 4, 7], [(2, MESSAGE), (4, "system"), (7, MESSAGE), (10, "user")]),
        ([9, 10], [(4, "system"), (10, "user")]),
    ],
)
def test_how_segments_are_split(ends, expected):
    prompt = list(range(10))
    segments, types = _split(prompt, [prompt[:4], prompt[4:]], ["system", "user"], ends)
    assert [x for segment in segments for x in segment] == prompt
    assert list(zip(np.cumsum([len(s) for s in segments]).tolist(), types, strict=True)) == expected


def test_points_that_wait_have_a_limit_and_belong_to_their_prompt():
    model, ids = tiny.MODELS["lfm2"](), list(range(1, 60))
    found = checkpoints_of(vkv.prefill(model, ids, checkpoints=[20, 40]).cache)
    points = ReadPoints(max_bytes=2 * found[0].nbytes)
    points.add(found)
    points.add(found[1:2])
    assert [c.tokens for c in points.of(ids)] == [40, 58]
    assert points.of([9, *ids]) == points.of([-1, 3]) == points.of([]) == []
    assert [c.tokens for c in points.of([*ids[:50], 3])] == [40]
    assert points.detached(points.attached(ids, [])) == []


def test_a_cache_that_cannot_be_taken_costs_a_line(caplog):
    points = ReadPoints()
    points.take([1, 2], [object()])
    assert "no checkpoint is kept" in caplog.text
    assert points.of([1, 2, 3]) == []


def test_a_job_serves_at_its_points():
    def job(count: int, points=(), trims=False) -> Job:
        tokens = bytes(b for x in range(count) for b in (x, 0, 0, 0))
        return Job(b"m", tokens, trims, [], None, None, {}, points)

    assert job(90, (30, 60)).covers(b"m", job(45).tokens) == 30
    assert job(90, (30, 60)).serves(job(70, (30,)))
    assert not job(90, (60,)).serves(job(70, (30,)))
    assert not job(200, (30,)).serves(job(70, (30,)))
    assert job(90, trims=True).serves(job(70))


def test_evaluated_in_the_thread_that_read_them():
    """Another thread stores them; it cannot compute what this one began."""
    model = tiny.MODELS["gemma3_text"]()
    cache, points = vkv.prefill(model, list(range(1, 50))).cache, ReadPoints()
    model(mx.array([[3, 4]]), cache=cache)
    points.take(list(range(1, 52)), cache)
    (found,) = points.of(list(range(1, 60)))
    assert found.nbytes
