"""Which rope a model applies to the keys it caches, seen from what it really does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import Llama3RoPE

from fixtures.models import tiny
from fixtures.models.build import build
from vkv.caches.rope import rotate
from vkv.format.schema import Rope
from vkv.identity import find

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
WINDOWS = {"sliding_window": 16, "sliding_window_pattern": 2, "num_hidden_layers": 4}
GEMMA4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [
        f"{kind}_attention" for kind in ["sliding", "full", "full", "sliding", "sliding", "full"]
    ],
    "sliding_window": 16,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": tiny.VOCAB,
}
GPT_OSS = {
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64},
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 16,
}
TWO = {"num_hidden_layers": 2}
SMALL = TWO | {"head_dim": 16}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}
BIASES = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_ctx": 64, "n_positions": 64}
PARTIAL = {"layer_norm_eps": 1e-5, "use_qkv_bias": False, "partial_rotary_factor": 0.5}
COHERE2 = WINDOWS | {"head_dim": 16, "layer_norm_eps": 1e-5, "logit_scale": 1.0}
LONGROPE = {"rope_scaling": LONG, "original_max_position_embeddings": 64}

#: name -> (module, configuration, rope of each cache entry)
MODELS: dict[str, tuple[str, dict[str, Any], list[str | None]]] = {
    "plain": ("llama", TWO, ["32 base"] * 2),
    "linear": ("llama", TWO | LINEAR, ["32 base scale"] * 2),
    "llama3": ("llama", TWO | {"rope_scaling": LLAMA3}, ["32 freqs"] * 2),
    "yarn": ("qwen2", SMALL | {"rope_scaling": YARN}, ["16 freqs mscale"] * 2),
    "longrope": ("phi3", TWO | LONGROPE | {"num_attention_heads": 2}, ["32 freqs mscale"] * 2),
    "yarn in a window": ("gpt_oss", GPT_OSS, ["32 freqs mscale"] * 2),
    "two bases": ("gemma3_text", WINDOWS, ["32 base"] * 4),
    "proportional, keys shared": (
        "gemma4_text",
        GEMMA4,
        ["32 base", "64 freqs", "64 freqs", "32 base"],
    ),
    "partial": ("stablelm", TWO | PARTIAL, ["8 base"] * 2),
    "traditional": ("helium", SMALL | BIASES, ["16 base traditional"] * 2),
    "none where global": ("cohere2", COHERE2, ["16 base traditional", None] * 2),
    "none in every fourth": (
        "smollm3",
        {"num_hidden_layers": 4, "head_dim": None},
        ["16 base", "16 base", "16 base", None],
    ),
    "none": ("gpt2", GPT2 | {"layer_norm_epsilon": 1e-5}, [None] * 2),
    "layers run twice": ("nanbeige", TWO | {"num_loops": 2}, ["32 base"] * 4),
}
KNOWN = [n for n, (module, _, _) in MODELS.items() if find_spec(f"mlx_lm.models.{module}")]


def described(rope: Rope | None) -> str | None:
    if rope is None:
        return None
    marks = {
        "base": rope.base is not None,
        "freqs": rope.freqs is not None,
        "traditional": rope.traditional,
        "scale": rope.scale != 1,
        "mscale": rope.mscale != 1,
    }
    return " ".join([str(rope.dims), *(mark for mark, true in marks.items() if true)])


@pytest.mark.parametrize("name", KNOWN)
def test_ropes_are_found(name: str) -> None:
    module, config, expected = MODELS[name]
    assert [described(rope) for rope in find(build(module, 0, mx.float32, config))] == expected


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Everything that models hand to ``mx.fast.rope``, in order."""
    taken = []
    rope = mx.fast.rope

    def record(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        taken.append(x)
        return rope(x, *args, **kwargs)

    monkeypatch.setattr(mx.fast, "rope", record)
    return taken


def fed(model: Any, *prompts: list[int]) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    for prompt in prompts:
        model(mx.array([prompt]), cache=cache)
    return cache


def is_one_of(x: mx.array, taken: list[mx.array]) -> bool:
    """Whether ``x`` was given to a rope, or begins with what was."""
    return any(
        t.shape[:3] == x.shape[:3]
        and t.shape[3] <= x.shape[3]
        and bool(mx.allclose(x[..., : t.shape[-1]], t, rtol=1e-4, atol=1e-5))
        for t in taken
    )


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "none"])
def test_undone_keys_are_what_the_rope_was_given(name: str, rotated: list[mx.array]) -> None:
    """The only witness that cannot err: the keys before the rope, of the second call."""
    module, config, _ = MODELS[name]
    model = build(module, 0, mx.float32, config)
    cache = fed(model, [5, 6, 7, 8, 9])
    rotated.clear()
    model(mx.array([[1, 2, 3]]), cache=cache)
    before = list(rotated)
    for entry, rope in zip(cache, find(model), strict=True):
        keys = entry.keys[..., 5:8, :]
        if rope is None:
            assert not is_one_of(keys, before)
        else:
            plain = msgspec.structs.replace(rope, mscale=1.0)  # applied before mx.fast.rope
            assert is_one_of(rotate(keys, plain, 5, inverse=True), before)


def test_a_norm_after_the_rope_does_no_harm() -> None:
    """llama4: keys of one token at many places differ, and are alike when undone."""
    model = tiny.llama4()
    cache = fed(model, [7] * 6)
    for entry, rope in zip(cache[:3], find(model), strict=False):
        assert rope is not None
        keys = entry.keys[..., :6, :]
        undone = rotate(keys, rope, 0, inverse=True)
        assert mx.allclose(undone, undone[..., :1, :], atol=1e-4)
        assert not mx.allclose(keys, keys[..., :1, :], atol=1e-2)
    assert find(model)[3] is None


FOUND = {
    "deepseek_v2": [None, None],
    "deepseek_v3": [None, None],
    "deepseek_v32": [None, None],
    "lfm2": [None, "16 base", None],
    "qwen3_next": [None, "8 base"],
    "falcon_h1": ["32 base", "32 base"],
    "mamba2": [None, None],
}


@pytest.mark.parametrize("name", FOUND)
def test_entries_without_keys_or_with_latents_have_no_rope(name: str) -> None:
    assert [described(rope) for rope in find(tiny.MODELS[name]())] == FOUND[name]


class Turned(nn.RoPE):
    """A subclass, which may do anything."""


class Stretched(Llama3RoPE):
    """The same of another class."""


@pytest.mark.parametrize(
    "rope",
    [
        Turned(32),
        Stretched(32, scaling_config=LLAMA3),
        nn.SinusoidalPositionalEncoding(32),
        nn.ALiBi(),
        None,
    ],
    ids=lambda rope: type(rope).__name__,
)
def test_unknown_ropes_are_not_guessed(rope: Any) -> None:
    model: Any = tiny.llama()
    model.layers[1].self_attn.rope = rope
    assert [described(r) for r in find(model)] == ["32 base", None]


def test_two_ropes_in_a_layer_are_not_guessed() -> None:
    model: Any = tiny.llama()
    model.layers[0].self_attn.other = nn.RoPE(32)
    assert [described(r) for r in find(model)] == [None, "32 base"]


def test_a_rope_of_another_release_is_not_guessed() -> None:
    model: Any = tiny.llama(rope_scaling=LLAMA3)
    model.layers[0].self_attn.rope._freqs = mx.ones((7,))
    del model.layers[1].self_attn.rope._freqs
    assert find(model) == [None, None]
