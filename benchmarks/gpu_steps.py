"""One generation step on dense and on packed caches: time and memory."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import vkv
from benchmarks.gpu_report import Report
from benchmarks.gpu_shapes import held

#: Steps that are timed: packed caches encode once among them.
STEPS = 64
PACKED = ("affine:bits=4", "nsnquant:bits=2", "kvquant:bits=3")
PEER = "mlx-lm kv-bits 4"


def steps(
    report: Report | None, model: Any, short: list[Any], tokens: int, names: list[str]
) -> None:
    """Rows for a past of ``tokens`` tokens, made of copies of ``short``; ``dense`` first."""
    dense = None
    for name in names:
        cache = _cache(model, name, short, tokens)
        held(cache)
        mx.clear_cache()
        mx.reset_peak_memory()
        before, size = mx.get_active_memory(), sum(c.nbytes for c in cache)
        try:
            times = _step(model, cache)
        except RuntimeError as error:  # MLX lacks a kernel for the peer's cache
            print(f"step at {tokens}, {name}: {error}", flush=True)
            continue
        dense = dense or times
        if report is not None:
            report.step(tokens, name, times, dense, size, mx.get_peak_memory() - before)
        del cache


def _cache(model: Any, name: str, short: list[Any], tokens: int) -> list[Any]:
    if name in PACKED:
        return _packed(model, name, short, tokens)
    out = []
    for pair in short:
        cache = KVCache()
        cache.update_and_fetch(*(_long(x, tokens) for x in pair))
        out.append(cache.to_quantized(group_size=64, bits=4) if "kv-bits" in name else cache)
        mx.eval(out[-1].state)
    return out


def _packed(model: Any, name: str, short: list[Any], tokens: int) -> list[Any]:
    """Packed caches; ``kvquant``, slow to encode, codes one layer, which stands for all."""
    caches = vkv.make_prompt_cache(model, name)
    for cache, pair in zip(caches, short, strict=True):
        if name.startswith("kvquant") and cache is not caches[0]:
            cache.rows_keys, cache.rows_values = caches[0].rows_keys, caches[0].rows_values
        else:
            keys, values = (_long(x, tokens) for x in pair)
            cache.rows_keys = cache.rows_keys.append(keys)
            cache.rows_values = cache.rows_values.append(values)
            mx.eval(cache.state)
    return caches


def _long(x: mx.array, tokens: int) -> mx.array:
    """``x`` over and over."""
    return mx.concatenate([x] * -(-tokens // x.shape[2]), axis=2)[..., :tokens, :]


def _step(model: Any, cache: list[Any]) -> list[float]:
    """Seconds of each of ``STEPS`` steps."""
    token, times = mx.array([[1]]), []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        mx.eval(model(token, cache=cache))
        times.append(time.perf_counter() - start)
    return times[2:]
