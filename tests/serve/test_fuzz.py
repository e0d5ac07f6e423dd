"""Requests made at random, and sampling numbers at the edges of their ranges."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.http_client import CHAT, TEXT, send
from vkv.serve.request import NEUTRAL, ChatRequest, TextRequest

pytestmark = [pytest.mark.slow, pytest.mark.hostile]

NUMBERS = [
    "frequency_context_size", "frequency_penalty", "min_p", "presence_context_size",
    "presence_penalty", "repetition_context_size", "repetition_penalty", "temperature", "top_k",
    "top_logprobs", "top_p", "xtc_probability", "xtc_threshold",
]  # fmt: skip
EDGES = [0, 1, 2, 0.0, 1.0, 0.5, 0.75, 0.001, 0.05, 1e-300, 5e-324, 1e9, 2**31 - 1, -2.0, 100, 300]
ALL = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "min_p": 0.1}
BASES = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 5} | ALL,
    {"temperature": 1.0, "seed": 3} | ALL,
    {"temperature": 1.0, "xtc_probability": 1.0},
]


@pytest.fixture(scope="module")
def server(run_server):
    with run_server() as server:
        yield server


@pytest.mark.parametrize("base", BASES, ids=["plain", "all", "seed", "xtc"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_at_the_edges(server, base, name):
    """Each is refused, or answered by tokens of the vocabulary."""
    for value in EDGES:
        body = {"prompt": "hello world", "max_tokens": 3, "logprobs": True} | base | {name: value}
        status, data = send(server.url, TEXT, body)
        assert status in (200, 400), (body, data)
        for token in (
            json.loads(data).get("choices", [{}])[0].get("logprobs", {}).get("content", [])
        ):
            assert 0 <= token["id"] < 259, body
            assert token["logprob"] <= 0, body
    assert not server.models[0]._generators[0]._faults


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9) | st.sampled_from(EDGES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
PARTS = st.dictionaries(st.sampled_from(["type", "text", "image_url", "image"]), VALUES)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "?"])},
        optional={
            "content": st.text(max_size=20) | st.lists(PARTS, max_size=2) | VALUES,
            "tool_calls": VALUES, "name": VALUES, "tool_call_id": VALUES,
        },
    )
    | VALUES,
    max_size=3,
)  # fmt: skip


def bodies(kind, **known):
    names = sorted({*kind.__struct_fields__, *NEUTRAL, "other"} - known.keys() - {"max_tokens"})
    others = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    return st.builds(lambda a, b: {"max_tokens": 2} | a | b, st.fixed_dictionaries(known), others)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.just(TEXT), bodies(TextRequest, prompt=st.text(max_size=30) | VALUES))
    | st.tuples(st.just(CHAT), bodies(ChatRequest, messages=MESSAGES | VALUES))
)
def test_bodies_made_at_random(server, request_of):
    path, body = request_of
    status, data = send(server.url, path, body)
    assert status in (200, 400, 404), data
    if status != 200:
        assert json.loads(data)["error"]["message"]
    assert not server.models[0]._generators[0]._faults


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.sampled_from([TEXT, CHAT]))
def test_bytes_made_at_random(server, data, path):
    assert send(server.url, path, data)[0] in (200, 400)
