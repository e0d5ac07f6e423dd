"""What of a model's caches is packed: one rule for fresh caches, loads and files."""

from __future__ import annotations

import re
import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from fixtures.models.build import build
from vkv.caches.packed.notes import unpacked
from vkv.format.layers import LATENTS

CODEC = "affine:bits=4,group=32"
IDS = [(37 * i + 11) % tiny.VOCAB for i in range(200)]


def falcon():
    """Each layer has a CacheList: recurrent state, then keys and values."""
    config = {
        "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4,
        "mamba_d_state": 16, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "head_dim": 64,
    }  # fmt: skip
    return build("falcon_h1", 0, mx.float32, config)


#: Model -> classes of its caches when packed was asked for, and what is said of the rest.
MODELS = {
    "llama": (lambda: tiny.llama(head_dim=64), ["PackedKVCache"] * 2, []),
    "gemma3_text": (
        tiny.gemma3_text,
        ["RotatingKVCache", "RotatingKVCache", "PackedKVCache"],
        ["layers 0-1 of 3: RotatingKVCache is not packed"],
    ),
    "falcon_h1": (
        falcon,
        ["ArraysCache", "PackedKVCache"] * 2,
        ["layers 0-1 of 2: ArraysCache is not packed"],
    ),
    "deepseek_v3": (tiny.deepseek_v3, ["KVCache"] * 2, [f"layers 0-1 of 2: .*{LATENTS}"]),
    "deepseek_v32": (
        tiny.deepseek_v32,
        ["KVCache"] * 4,
        [f"layers 0-1 of 2: .*{LATENTS}", "layers 0-1 of 2: KVCache is not packed"],
    ),
}


def classes(caches) -> list[str]:
    return [type(leaf).__name__ for c in caches for leaf in getattr(c, "caches", None) or [c]]


def packed(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        caches = vkv.make_prompt_cache(model, CODEC)
    return caches, [str(w.message) for w in caught]


def filled(model, caches):
    mx.eval(model(mx.array([IDS]), cache=caches), [c.state for c in caches])
    return caches


@pytest.mark.parametrize("name", MODELS)
def test_fresh_caches(name):
    make, names, texts = MODELS[name]
    caches, said = packed(make())
    assert classes(caches) == names
    assert len(said) == len(texts)
    for text, pattern in zip(said, texts, strict=True):
        assert re.match(pattern, text)
    assert all(c.empty() for c in caches), "the trial token is not in them"


@pytest.mark.parametrize("name", MODELS)
def test_a_load_packs_what_a_fresh_cache_would(name, tmp_path):
    make, names, texts = MODELS[name]
    model = make()
    dense = filled(model, make_prompt_cache(model))
    vkv.save(tmp_path / "a.vkv", dense, tokens=IDS, model=model, codec=CODEC)
    prompt = vkv.load(tmp_path / "a.vkv", model=model, live="packed")
    assert classes(prompt.cache) == names
    assert bool(prompt.notes) == bool(texts)
    plain = vkv.load(tmp_path / "a.vkv", model=model)
    assert plain.notes == []
    fresh = filled(model, packed(model)[0])
    sizes = [sum(c.nbytes for c in caches) for caches in (plain.cache, prompt.cache)]
    assert (sizes[1] < sizes[0]) == ("PackedKVCache" in names)
    assert classes(fresh) == names
    token = mx.array([[5]])
    want = model(token, cache=plain.cache)
    assert mx.allclose(
        model(token, cache=prompt.cache), want, rtol=2e-3, atol=2e-3
    )  # attends to codes


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_latents_are_exact(name):
    model = MODELS[name][0]()
    caches = filled(model, packed(model)[0])
    dense = filled(model, make_prompt_cache(model))
    token = mx.array([[5]])
    assert mx.array_equal(model(token, cache=caches), model(token, cache=dense))


def test_notes_say_how_many_bytes():
    model = tiny.gemma3_text()
    caches = filled(model, packed(model)[0])
    sizes = [c.nbytes for c in caches]
    assert unpacked(caches, sizes=True) == [
        f"layers 0-1 of 3: RotatingKVCache is not packed; "
        f"{sum(sizes[:2]):,} of {sum(sizes):,} bytes"
    ]


def test_latents_that_no_trial_found_are_held_exactly():
    """A model that needs more than tokens cannot be tried: the cache itself decides."""
    cache = vkv.make_prompt_cache(tiny.llama(head_dim=64), CODEC)[0]
    latents = mx.random.normal((1, 1, 100, 64)), mx.random.normal((1, 1, 100, 32))
    cache.update_and_fetch(*latents)
    cache.settle()
    assert LATENTS in cache.note
    assert not cache.encodes
    assert all(mx.array_equal(a, b) for a, b in zip(cache.keys_and_values(), latents, strict=True))


def test_a_model_that_refuses_packed_caches_gets_its_own():
    class Picky(type(tiny.llama())):
        def __call__(self, inputs, cache=None):
            if any(type(c).__name__ == "PackedKVCache" for c in cache):
                raise ValueError("only my own")
            return super().__call__(inputs, cache=cache)

    model = tiny.llama()
    model.__class__ = Picky
    with pytest.warns(UserWarning, match=r"does not run on packed caches .*only my own"):
        caches = vkv.make_prompt_cache(model, CODEC)
    assert classes(caches) == ["KVCache"] * 2
    assert all(c.empty() for c in caches)


def sharing():
    """Its last layers attend to the keys of an earlier one, read from that one's cache."""
    config = {
        "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 2,
        "num_kv_heads": 1, "hidden_dim_scale_factor": 2.0,
    }  # fmt: skip
    return build("afm7", 0, mx.float32, config)


def test_layers_that_share_keys_attend_to_the_present_call_exactly():
    """In mlx-lm 0.31 they read ``state``, which a packed cache has otherwise: then none is."""
    model = sharing()
    caches, said = packed(model)
    assert bool(said) == ("KVCache" in classes(caches))
    prompt = mx.array([IDS])
    assert mx.array_equal(
        model(prompt, cache=caches), model(prompt, cache=make_prompt_cache(model))
    )
