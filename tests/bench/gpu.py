"""Load and save at 8B shape on a GPU, against mlx-lm's own functions and recomputing.

    make bench-gpu        needs MLX's CUDA backend; no network

A random llama of 8B shape (hidden 4096, 32 layers, 8 KV heads, head dim 128, bf16)
is built on the spot. All rows are of one run; files are read from the page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache

import vkv
from vkv.bench.report import machine, versions


def model_8b(layers: int) -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama", hidden_size=4096, num_hidden_layers=layers, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        vocab_size=32000, rope_theta=500000.0, max_position_embeddings=131072,
    )  # fmt: skip
    model = llama.Model(args)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def prefill(model: llama.Model, tokens: int, step: int = 2048) -> list[KVCache]:
    cache = make_prompt_cache(model)
    ids = mx.arange(tokens)[None] % 32000
    for at in range(0, tokens, step):
        model(ids[:, at : at + step], cache=cache)
        mx.eval([c.state for c in cache])
    mx.synchronize()
    return cache


def timed(call: Callable[[], Any], repeat: int) -> dict[str, float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def held(cache: list[Any]) -> None:
    mx.eval([c.state for c in cache])


def measure(
    tokens: int, layers: int, repeat: int, codecs: list[str], folder: Path
) -> dict[str, Any]:
    model = model_8b(layers)
    prefill(model, 4096)  # warm up
    rows: dict[str, Any] = {"recompute": timed(lambda: prefill(model, tokens), repeat)}
    cache = prefill(model, tokens)
    path = folder / "mlx.safetensors"
    rows["mlx-lm save"] = timed(lambda: save_prompt_cache(str(path), cache), repeat)
    rows["mlx-lm load"] = timed(lambda: held(load_prompt_cache(str(path))), repeat)
    for codec in codecs:
        rows |= codec_rows(codec, cache, model, repeat, folder / "cache.vkv")
    return rows


def codec_rows(
    codec: str, cache: list[Any], model: llama.Model, repeat: int, file: Path
) -> dict[str, Any]:
    def save(durable: bool) -> None:
        vkv.save(file, cache, model=model, codec=codec, durable=durable)

    def load(**options: Any) -> None:
        held(vkv.load(file, **options).cache)

    rows: dict[str, Any] = {
        f"{codec} save": timed(lambda: save(True), repeat),
        f"{codec} save, not flushed": timed(lambda: save(False), repeat),
        f"{codec} size": file.stat().st_size,
    }
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    rows[f"{codec} load dense"] = timed(load, repeat)
    rows[f"{codec} load dense peak"] = mx.get_peak_memory() - before
    rows[f"{codec} load dense, unverified"] = timed(lambda: load(verify=False), repeat)
    if codec != "raw":
        rows[f"{codec} load packed"] = timed(lambda: load(live="packed"), repeat)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--codecs", default="raw affine:bits=4")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vkv-bench-"))
    try:
        rows = measure(
            options.tokens, options.layers, options.repeat, options.codecs.split(), folder
        )
    finally:
        shutil.rmtree(folder)
    found = {"tokens": options.tokens, "layers": options.layers, "rows": rows}
    options.output.write_text(
        json.dumps(found | {"versions": versions(), "machine": machine()}, indent=2) + "\n"
    )
    for name, row in rows.items():
        text = f"{row['median']:9.3f} s" if isinstance(row, dict) else f"{row / 1e6:9.0f} MB"
        print(f"{name:45} {text}", flush=True)


if __name__ == "__main__":
    main()
