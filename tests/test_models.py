"""The tiny models and their directories on disk, the real model, and the texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from fixtures.models import tiny
from fixtures.models.smollm2 import smollm2

KINDS = {
    "llama": ["KVCache", "KVCache"],
    "gemma3_text": ["RotatingKVCache", "RotatingKVCache", "KVCache"],
    "deepseek_v2": ["KVCache", "KVCache"],
    "deepseek_v3": ["KVCache", "KVCache"],
    "deepseek_v32": ["CacheList(KVCache, KVCache)"] * 2,
    "llama4": ["ChunkedKVCache", "ChunkedKVCache", "ChunkedKVCache", "KVCache"],
    "lfm2": ["ArraysCache", "KVCache", "ArraysCache"],
    "qwen3_next": ["ArraysCache", "KVCache"],
    "falcon_h1": ["CacheList(ArraysCache, KVCache)"] * 2,
    "mamba2": ["ArraysCache", "ArraysCache"],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# Name: SHA-256 and tokens.
TEXTS = {
    "prose.txt": ("fb68f7337b0f3ab0b0541175e4d3f7c3606fc35ff659926e2bc4aefa8d548eee", 15831),
    "other.txt": ("29e9334da0b38ab7e42833e09cc9e2a0c3d24d05060bdccfb76fbf091dac2c4a", 7873),
}
# Token ids as llama.cpp gives them for the same GGUF file.
SMOLLM2 = {
    "Hello, world!": [19556, 28, 905, 17],
    "The year 1984": [504, 713, 216, 33, 41, 40, 36],
    "   indented\n\tcode()": [256, 641, 6574, 198, 197, 4635, 1000],
    "It's we'll I'VE don't": [1589, 506, 392, 3060, 339, 23, 18525, 1326, 982],
    "67.89 ½ ²": [38, 39, 30, 40, 41, 216, 16738, 216, 19133],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "\xa0nbsp\u200bzw": [15442, 94, 32093, 321, 229, 106, 103],
    "٣٤٥ arabic": [164, 113, 164, 114, 164, 115, 46179, 286],
    "e\u0301 combining": [85, 151, 219, 9301],
    "Ünïcödé 𝔘": [142, 246, 94, 25972, 83, 7466, 84, 2756, 216, 23159, 238, 242],
}
TOKENS = mx.array([[(37 * i + 11) % tiny.VOCAB for i in range(40)]])

Builder = Callable[..., Any]


def run(model: Any, *sizes: int) -> np.ndarray:
    """Logits of ``TOKENS`` through one cache, in pieces of the given sizes."""
    cache, start, out = make_prompt_cache(model), 0, []
    for size in sizes:
        out.append(model(TOKENS[:, start : start + size], cache=cache))
        start += size
    return np.array(mx.concatenate(out, axis=1))


def kind(cache: Any) -> str:
    inner = f"({', '.join(map(kind, cache.caches))})" if hasattr(cache, "caches") else ""
    return type(cache).__name__ + inner


def test_every_model_has_its_kinds_of_cache() -> None:
    assert {
        n: [*map(kind, make_prompt_cache(build()))] for n, build in tiny.MODELS.items()
    } == KINDS


@pytest.mark.parametrize("build", tiny.MODELS.values(), ids=tiny.MODELS)
def test_pieces_equal_the_whole(build: Builder) -> None:
    model = build()
    np.testing.assert_allclose(run(model, 18, 15, 1, 1, 5), run(model, 40), atol=2e-5)


@pytest.mark.parametrize("build", tiny.MODELS.values(), ids=tiny.MODELS)
def test_weights_depend_on_the_seed_alone(build: Builder) -> None:
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(7)
    first = run(build(), 40)
    assert mx.random.uniform(shape=(4,)).tolist() == expected  # the global state is untouched
    np.testing.assert_array_equal(run(build(), 40), first)
    assert np.abs(run(build(seed=1), 40) - first).max() > 0.1


@pytest.mark.parametrize("build", tiny.MODELS.values(), ids=tiny.MODELS)
def test_half_precision(build: Builder) -> None:
    model = build(dtype=mx.float16)
    assert model(TOKENS, cache=make_prompt_cache(model)).dtype == mx.float16


@pytest.mark.parametrize("build", tiny.MODELS.values(), ids=tiny.MODELS)
def test_directory_opens_in_mlx_lm(build: Builder, tmp_path: Path) -> None:
    model = build()
    loaded, _ = mlx_lm.load(str(tiny.save_dir(model, tiny.tokenizer(), tmp_path / "model")))
    np.testing.assert_array_equal(run(loaded, 40), run(model, 40))


def test_deepseek_v2_values_are_narrower_than_its_keys() -> None:
    model: Any = tiny.MODELS["deepseek_v2"]()
    cache = make_prompt_cache(model)
    model(TOKENS, cache=cache)
    assert (cache[0].keys.shape[-1], cache[0].values.shape[-1]) == (48, 32)


@pytest.mark.parametrize(
    "options",
    [{"rope_theta": 500_000.0}, {"rope_scaling": LLAMA3}, {"layers": 3}, {"head_dim": 64}],
    ids=str,
)
def test_llama_options_matter(options: dict[str, Any]) -> None:
    base, other = tiny.MODELS["llama"](), tiny.MODELS["llama"](**options)
    assert np.abs(run(base, 40) - run(other, 40)).max() > 1e-3


def test_llama_window_rotates() -> None:
    model: Any = tiny.MODELS["llama"](window=16)
    assert [kind(c) for c in make_prompt_cache(model)] == ["KVCache", "RotatingKVCache"]
    np.testing.assert_allclose(run(model, 30, *[1] * 10), run(model, 40), atol=2e-5)


def test_adapter_changes_the_output_and_survives_the_disk(tmp_path: Path) -> None:
    plain = tiny.save_dir(tiny.MODELS["llama"](), tiny.tokenizer(), tmp_path / "model")
    adapted = tiny.with_lora(tiny.MODELS["llama"]())
    assert np.abs(run(adapted, 40) - run(tiny.MODELS["llama"](), 40)).max() > 0.1
    adapter = tiny.save_adapter(adapted, tmp_path / "adapter")
    loaded, _ = mlx_lm.load(str(plain), adapter_path=str(adapter))
    np.testing.assert_array_equal(run(loaded, 40), run(adapted, 40))


@pytest.mark.parametrize("text", ["plain", "naïve café 日本語 🙂\n\t 1984", "\x00\x7f", ""])
def test_tokenizer_gives_one_token_a_byte(text: str) -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_generation_from_a_directory(tmp_path: Path) -> None:
    path = tiny.save_dir(tiny.MODELS["llama"](), tiny.tokenizer(), tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {2}
    pieces = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=5))
    again = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=5))
    assert [p.token for p in pieces] == [p.token for p in again]
    assert 1 <= len(pieces) <= 5


def read(name: str) -> bytes:
    return (Path(__file__).parents[1] / "fixtures" / "text" / name).read_bytes()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_the_measured_bytes(name: str) -> None:
    assert hashlib.sha256(read(name)).hexdigest() == TEXTS[name][0]


@pytest.mark.model
def test_smollm2_tokens() -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(smollm2())
    assert {line: tokenizer.encode(line) for line in SMOLLM2} == SMOLLM2
    assert all(tokenizer.decode(ids) == line for line, ids in SMOLLM2.items())
    tokenizer.model_max_length = 1 << 20  # else it warns of long texts
    counts = {name: len(tokenizer.encode(read(name).decode())) for name in TEXTS}
    assert counts == {name: tokens for name, (_, tokens) in TEXTS.items()}


@pytest.mark.model
def test_smollm2_answers() -> None:
    model, tokenizer = mlx_lm.load(str(smollm2()))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."
