"""A random model of 8B shape, and its caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

VOCAB = 32000


def model_8b(layers: int) -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama", hidden_size=4096, num_hidden_layers=layers, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        vocab_size=VOCAB, rope_theta=500000.0, max_position_embeddings=131072,
    )  # fmt: skip
    model = llama.Model(args)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def prefill(model: llama.Model, tokens: int, step: int = 2048) -> list[KVCache]:
    cache = make_prompt_cache(model)
    ids = mx.arange(tokens)[None] % VOCAB
    for at in range(0, tokens, step):
        model(ids[:, at : at + step], cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def sliced(cache: list[KVCache], tokens: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of the first tokens of each layer."""
    pairs = [(c.keys[..., :tokens, :], c.values[..., :tokens, :]) for c in cache]
    pairs = [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in pairs]
    mx.eval(pairs)
    return pairs


def held(cache: list[Any]) -> None:
    """Wait for everything in ``cache``."""
    mx.eval([c.state for c in cache])
