"""Attention of one new token, one layer of 8B shape: dense, and on the codes of a packed cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from benchmarks.gpu_report import Report
from benchmarks.gpu_steps import PACKED
from vkv.caches.attention.attend import Layer
from vkv.caches.packed.make import make_prompt_cache

#: Calls of one evaluation, and evaluations.
CALLS, REPEAT = 64, 12
SCALE = 128**-0.5


def attention(report: Report, model: Any, tokens: int) -> None:
    """Rows for a past of ``tokens`` tokens; layers enough that no cache of the GPU holds them."""
    layers = max(1, min(8, (1 << 17) // tokens))
    queries = mx.random.normal((1, 32, 1, 128)).astype(mx.bfloat16)
    pairs = [
        [mx.random.normal((1, 8, tokens, 128)).astype(mx.bfloat16) for _ in range(2)]
        for _ in range(layers)
    ]
    mx.eval(queries, pairs)
    dense = [_dense(queries, *pair) for pair in pairs]
    report.attention(tokens, "dense", _times(dense))
    for codec in (name for name in PACKED if not name.startswith("kvquant")):
        caches = make_prompt_cache(model, codec)[:layers]
        report.attention(
            tokens,
            codec,
            _times([_coded(queries, c, p) for c, p in zip(caches, pairs, strict=True)]),
        )


def _dense(queries: mx.array, keys: mx.array, values: mx.array) -> Callable[[], mx.array]:
    return lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)


def _coded(queries: mx.array, cache: Any, pair: list[mx.array]) -> Callable[[], mx.array]:
    keys, values = pair
    cache.rows_keys, cache.rows_values = (
        cache.rows_keys.append(keys), cache.rows_values.append(values)
    )  # fmt: skip
    cache.settle()
    cache.rows_keys, cache.rows_values = (
        cache.rows_keys.append(keys[..., :1, :]), cache.rows_values.append(values[..., :1, :])
    )  # fmt: skip
    mx.eval(cache.rows_keys.arrays, cache.rows_values.arrays)
    layer, one, two = Layer(), cache.rows_keys.past(), cache.rows_values.past()
    return lambda: layer.attend(queries, one, two, SCALE, False, cache.keys_and_values)


def _times(calls: list[Callable[[], mx.array]]) -> list[float]:
    """Seconds of a call, of each of ``REPEAT`` evaluations."""
    times = []
    for _ in range(REPEAT + 2):
        start = time.perf_counter()
        mx.eval([calls[i % len(calls)]() for i in range(CALLS)])
        times.append((time.perf_counter() - start) / CALLS)
    return times[2:]
