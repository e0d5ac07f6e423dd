"""Files and packed caches at 8B shape on a GPU, against mlx-lm's own and recomputing.

    make bench-gpu        needs MLX's CUDA or Metal backend; no network

A random llama of 8B shape (hidden 4096, 32 layers, 8 KV heads, head dim 128, bf16)
is built on the spot. All rows are of one run; files are read from the page cache.
Writes ``gpu.json`` and ``gpu.md``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import vkv
from benchmarks.gpu_attention import attention
from benchmarks.gpu_floors import floors
from benchmarks.gpu_report import Report, timed
from benchmarks.gpu_shapes import held, model_8b, prefill, sliced
from benchmarks.gpu_steps import PACKED, PEER, steps

#: Layers of the rows of ``kvquant``, whose encoder runs on one core of the CPU.
FEW = 2
CODECS = ("affine:bits=4", "nsnquant:bits=2")


class Files:
    """Saving and loading one cache."""

    def __init__(self, report: Report, model: Any, cache: list[Any], folder: Path, repeat: int):
        self._report, self._model, self._cache = report, model, cache
        self._folder, self._repeat = folder, repeat

    def mlx_lm(self) -> None:
        """The peer: its own file, raw and with its own quantization."""
        for name, make in (("raw", lambda c: c), ("kv-bits 4", _quantized)):
            cache, path = [make(c) for c in self._cache], self._folder / "mlx.safetensors"
            held(cache)

            def save(c: list[Any] = cache, p: Path = path) -> None:
                p.unlink(missing_ok=True)
                save_prompt_cache(str(p), c)

            self._time(f"mlx-lm {name}: save", save)
            self._time(f"mlx-lm {name}: load", lambda p=path: held(load_prompt_cache(str(p))))
            self._report.size(f"mlx-lm {name}", path.stat().st_size)
            path.unlink()

    def codec(self, text: str, *, few: bool = False) -> None:
        """Rows of one codec; with ``few`` of the first layers only, without the model."""
        path = self._folder / "cache.vkv"
        cache = self._cache[:FEW] if few else self._cache
        model = None if few else self._model
        name = f"{text}, {FEW} layers" if few else text
        repeat = 1 if few else self._repeat

        def save(durable: bool) -> None:
            path.unlink(missing_ok=True)
            vkv.save(path, cache, model=model, codec=text, durable=durable)

        self._report.time(f"{name}: save, not flushed", timed(lambda: save(False), repeat))
        self._report.time(f"{name}: save", timed(lambda: save(True), repeat))
        self._report.size(name, path.stat().st_size)
        for how, options in _ways(text):
            self._time(f"{name}: load{how}", lambda o=options: held(vkv.load(path, **o).cache))
        path.unlink()

    def _time(self, name: str, call: Any) -> None:
        self._report.time(name, timed(call, self._repeat))


def _ways(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield " dense" if text != "raw" else "", {}
    yield (" dense" if text != "raw" else "") + ", unverified", {"verify": False}
    if text != "raw":
        yield " packed", {"live": "packed"}


def _quantized(cache: Any) -> Any:
    return cache.to_quantized(group_size=64, bits=4)


def warm_up(report: Report, model: Any, cache: list[Any], folder: Path) -> None:
    """Everything once on a little: MLX compiles kernels when a machine first needs them."""
    little = [KVCache() for _ in cache]
    for layer, (keys, values) in zip(little, sliced(cache, 512), strict=True):
        layer.update_and_fetch(keys, values)
    for text in ("raw", *PACKED):
        with report.first(text):
            vkv.save(folder / "little.vkv", little[:FEW], codec=text)
            held(vkv.load(folder / "little.vkv").cache)
            if text != "raw":
                steps(None, model, sliced(cache, 64), 64, [text])


def measure(options: argparse.Namespace, report: Report, folder: Path) -> None:
    model = model_8b(options.layers)
    floors(report, folder)
    prefill(model, 4096)  # warm up
    report.time("recompute", timed(lambda: prefill(model, options.tokens), 1))
    cache = prefill(model, options.tokens)
    warm_up(report, model, cache, folder)
    files = Files(report, model, cache, folder, options.repeat)
    files.codec("raw")
    files.mlx_lm()
    for text in CODECS:
        files.codec(text)
    files.codec("kvquant:bits=3", few=True)
    short = sliced(cache, 4096)
    del files, cache
    mx.clear_cache()
    for tokens in options.steps:
        attention(report, model, tokens)
        steps(report, model, short, tokens, ["dense", PEER, *PACKED])


def measure_steps(options: argparse.Namespace, report: Report) -> None:
    """Time attention and steps alone."""
    report.keep()
    model = model_8b(options.layers)
    for tokens in options.steps:
        attention(report, model, tokens)
    short = sliced(prefill(model, 4096), 4096)
    for tokens in options.steps:
        steps(report, model, short, tokens, ["dense", *CODECS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--only-steps", action="store_true", help="keep the other rows")
    parser.add_argument("-o", "--output", type=Path, default=Path("spec/bench"))
    options = parser.parse_args()
    report = Report(options.tokens, options.layers, options.output)
    folder = Path(tempfile.mkdtemp(prefix="vkv-bench-"))
    try:
        if options.only_steps:
            measure_steps(options, report)
        else:
            measure(options, report, folder)
    finally:
        shutil.rmtree(folder)
        report.write()


if __name__ == "__main__":
    main()
