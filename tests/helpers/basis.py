"""Train a basis of a tiny model, and make caches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny

MODEL = tiny.llama(head_dim=32)
OTHER = tiny.llama(seed=1, head_dim=32)


def text(seed: int, count: int) -> list[int]:
    """Few words, over and over, so that caches of different texts are alike."""
    random = np.random.default_rng(seed)
    return (random.zipf(1.6, count) % tiny.VOCAB).tolist()


def caches(model: Any = MODEL, tokens: int = 600, seed: int = 9) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([text(seed, tokens)]), cache=cache))
    return cache


def train(path: Path, model: Any = MODEL, **options: Any) -> vkv.Info:
    options = {"context": 300, "probe": 80} | options
    texts = [text(seed, 400) for seed in (0, 1)]
    return vkv.train_basis(path, model, texts, durable=False, **options)
