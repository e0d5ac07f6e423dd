"""Gradients of a model's own log-probabilities by its cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from fixtures.models import tiny
from vkv.bench.quality import log_probs
from vkv.caches.basis.fisher import gradients
from vkv.caches.kinds.live import snapshot

CONTEXT, PROBE = 48, 16
IDS = np.random.default_rng(0).integers(0, tiny.VOCAB, CONTEXT + PROBE).tolist()


def caches(model, added=None, path=""):
    """The context in fresh caches; ``added`` to one tensor."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS[:CONTEXT]]), cache=cache))
    if added is not None:
        _, layer, name = path.split(".")
        held = getattr(cache[int(layer)], name)
        held[..., :CONTEXT, :] = held[..., :CONTEXT, :] + added
    return cache


@pytest.mark.parametrize("path", ["layers.0.keys", "layers.0.values", "layers.1.values"])
def test_they_foretell_the_kl_of_small_errors(path):
    """KL = tr(F E) / 2 for errors of covariance E."""
    model, size = tiny.llama(), 0.02
    snapshots = [snapshot(c) for c in caches(model)]
    grads = [gradients(model, snapshots, [path], IDS[CONTEXT:], seed)[path] for seed in range(150)]
    foretold = size**2 / 2 * float(np.mean([mx.square(g).sum().item() for g in grads])) / PROBE
    reference = log_probs(model, caches(model), IDS[CONTEXT:])
    found = []
    for seed in range(30):
        error = size * mx.random.normal(grads[0].shape, key=mx.random.key(seed))
        other = log_probs(model, caches(model, error, path), IDS[CONTEXT:])
        found.append(float((mx.exp(reference) * (reference - other)).sum(-1).mean().item()))
    assert np.mean(found) == pytest.approx(foretold, rel=0.35)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "layers.1.keys"),
        ("gemma3_text", "layers.1.values"),
        ("llama4", "layers.3.values"),
        ("falcon_h1", "layers.1.1.values"),
    ],
)
def test_the_cache_is_left_as_it_was(name, path):
    model = tiny.MODELS[name]()
    cache = caches(model)
    snapshots = [snapshot(c) for c in cache]
    first = gradients(model, snapshots, [path], IDS[CONTEXT:], 0)[path]
    again = gradients(model, snapshots, [path], IDS[CONTEXT:], 0)[path]
    assert mx.array_equal(first, again)
    assert mx.abs(first).max() > 0
