"""A GGUF file becomes a model directory that ``mlx_lm.load`` opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.helpers.gguf_writer import DIM, KV_HEADS, META, SHAPES, TOKENS, write_gguf
from vkv.demo.gguf import FILES, convert
from vkv.errors import VkvError


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_weights_are_what_ggml_says(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    loaded: Any = mx.load(str(tmp_path / "model.safetensors"))
    weights = {name: np.array(weight) for name, weight in loaded.items()}
    assert {w.dtype for w in weights.values()} == {np.dtype("float32")}
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    }.items():
        np.testing.assert_array_equal(weights[f"{ours}.weight"], values[theirs])
    assert len(weights) == len(SHAPES)


def test_heads_are_reordered_for_the_rope(gguf: Path, tmp_path: Path) -> None:
    """GGUF's own order with the interleaved rope is the same function."""
    values = write_gguf(gguf)
    convert(gguf, tmp_path)
    ours, _ = mlx_lm.load(str(tmp_path))
    theirs, _ = mlx_lm.load(str(tmp_path), model_config={"rope_traditional": True})
    for i, layer in enumerate(theirs.layers):
        layer.self_attn.q_proj.weight = mx.array(values[f"blk.{i}.attn_q"])
        layer.self_attn.k_proj.weight = mx.array(values[f"blk.{i}.attn_k"])
    tokens = mx.array([[5, 99, 4, 250, 77, 31, 8, 8, 120]])
    np.testing.assert_allclose(np.array(ours(tokens)), np.array(theirs(tokens)), atol=1e-4)


def test_config(gguf: Path, tmp_path: Path) -> None:
    convert(gguf, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (len(TOKENS), True)
    assert (config["num_key_value_heads"], config["head_dim"]) == (KV_HEADS, DIM)
    assert {entry.name for entry in tmp_path.iterdir()} == {*FILES, "tiny.gguf"}


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("hello", ["hello"]),
        ("1984", ["1", "9", "8", "4"]),
        ("hello 42", ["hello", "Ġ", "4", "2"]),
        ("<|im_start|>he<|im_end|>", ["<|im_start|>", "he", "<|im_end|>"]),
        ("ö", ["Ã", "¶"]),
    ],
)
def test_tokenizer(gguf: Path, tmp_path: Path, line: str, pieces: list[str]) -> None:
    convert(gguf, tmp_path)
    _, tokenizer = mlx_lm.load(str(tmp_path))
    ids = tokenizer.encode(line)
    assert [TOKENS[i] for i in ids] == pieces
    assert tokenizer.decode(ids) == line
    assert tokenizer.eos_token_ids == {2}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}])
    assert [TOKENS[i] for i in chat] == ["<|im_start|>", "he", "<|im_end|>"]


@pytest.mark.parametrize(
    ("key", "value"), [("general.architecture", "gpt2"), ("tokenizer.ggml.pre", "llama-bpe")]
)
def test_other_models_are_refused(tmp_path: Path, key: str, value: str) -> None:
    write_gguf(tmp_path / "other.gguf", **{key: value})
    with pytest.raises(VkvError, match=f"{key}: found '{value}', expected '{META[key]}'"):
        convert(tmp_path / "other.gguf", tmp_path)
