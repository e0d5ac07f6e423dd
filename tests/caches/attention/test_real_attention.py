"""SmolLM2 says the same on codes as on decoded rows."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load as load_model

import vkv
from vkv.demo.model import smollm2

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT = Path(__file__).parents[3] / "fixtures" / "text" / "prose.txt"
CONTEXT, NEW = 400, 200


@pytest.fixture(scope="module")
def real():
    return load_model(str(smollm2()))[:2]


def greedy(model, cache, logits: mx.array) -> list[int]:
    out = []
    for _ in range(NEW):
        out.append(int(mx.argmax(logits)))
        logits = model(mx.array([out[-1:]]), cache=cache)[0, -1]
    return out


@pytest.mark.parametrize("codec", ["affine:bits=4", "nsnquant:bits=2"])
def test_greedy_tokens_are_those_on_decoded_rows(real, codec):
    model, tokenizer = real
    ids = tokenizer.encode(TEXT.read_text()[:8000])[:CONTEXT]
    cache = vkv.make_prompt_cache(model, codec)
    logits = model(mx.array([ids]), cache=cache)[0, -1]
    mx.eval([layer.state for layer in cache])
    twins = copy.deepcopy(cache)
    for twin in twins:
        twin.attention = None
    assert greedy(model, cache, logits) == greedy(model, twins, logits)
