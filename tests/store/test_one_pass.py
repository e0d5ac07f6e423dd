"""A hit parses the header of its file once, and looks at the model's weights once."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.format import header
from vkv.identity import model as model_identity


@pytest.mark.parametrize("live", ["dense", "packed"])
def test_a_hit_is_one_pass(live, tmp_path, monkeypatch):
    model, ids = tiny.llama(head_dim=64), [(37 * i + 11) % tiny.VOCAB for i in range(200)]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    store = vkv.PromptStore(tmp_path)
    store.put(cache, ids, model=model, codec="nsnquant:bits=2")
    calls = []

    def counted(name, function):
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(header, "load", counted("header", header.load))
    weights = counted("weights", model_identity.parameters)
    monkeypatch.setattr(model_identity, "parameters", weights)
    hit = store.get([*ids, 1], model=model, live=live)
    assert hit.tokens == 200
    assert sorted(calls) == ["header", "weights"]
