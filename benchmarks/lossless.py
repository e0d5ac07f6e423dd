"""Time entropy coders on the caches of a real model, for ``spec/decisions/0014``.

    python -m benchmarks.lossless        reads 4,096 tokens through SmolLM2: some minutes

Bits are of all layers. Speeds are of one thread, in MB of values a second of CPU time,
the best of three runs: on a busy machine compare rows of one run only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

from fixtures.models.smollm2 import smollm2
from vkv.codecs import threads
from vkv.codecs.lossless import frames
from vkv.codecs.lossless.codec import Lossless
from vkv.codecs.protocol import DTYPES

TEXT = Path(__file__).parents[1] / "fixtures" / "text" / "prose.txt"
KINDS = {2: "u16", 4: "u32", 1: "u8"}
#: Encode and decode one tensor.
Coder = tuple[Callable[[mx.array], Any], Callable[[Any], Any], Callable[[Any], int]]


def caches(tokens: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of each layer after so many tokens of prose, float32."""
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = load(str(smollm2()))[:2]
    ids = tokenizer.encode(TEXT.read_text())[:tokens]
    cache = make_prompt_cache(model)
    for at in range(0, len(ids), 512):
        mx.eval(model(mx.array([ids[at : at + 512]]), cache=cache))
    return [(c.keys[..., :tokens, :], c.values[..., :tokens, :]) for c in cache]


def words(x: mx.array) -> np.ndarray:
    """Values as integers, (H, T, D)."""
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))[0]


def pcodec(data: np.ndarray) -> bytes:
    """A chunk and its one page, mode Classic, level 8."""
    config = ChunkConfig(
        compression_level=8,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([data.size]),
        enable_8_bit=True,
    )
    coder = wrapped.FileCompressor().chunk_compressor(data, config)
    return bytes(coder.write_meta() + coder.write_page(0))


def unpcodec(data: bytes, count: int, itemsize: int) -> None:
    reader, _ = wrapped.FileDecompressor.new(b"\x04\x01")
    chunk, used = reader.chunk_decompressor(data, KINDS[itemsize])
    chunk.read_page_into(data[used:], count, np.empty(count, f"u{itemsize}"))


def chunked(cut: Callable[[np.ndarray], list[np.ndarray]]) -> Coder:
    """Pcodec on chunks of a tensor."""

    def encode(x: mx.array) -> list[tuple[bytes, int, int]]:
        pieces = (np.ascontiguousarray(p).reshape(-1) for p in cut(words(x)))
        return [(pcodec(p), p.size, p.itemsize) for p in pieces]

    def decode(coded: list[tuple[bytes, int, int]]) -> None:
        for piece in coded:
            unpcodec(*piece)

    return encode, decode, lambda coded: sum(len(data) for data, _, _ in coded)


def in_planes(split: bool) -> Coder:
    """Zstandard on the bytes of a tensor, as they are or sorted by place."""

    def encode(x: mx.array) -> tuple[list[bytes], int]:
        data = words(x)
        planes = data.view(np.uint8).reshape(-1, data.itemsize if split else 1)
        return [frames.compress(np.ascontiguousarray(p)) for p in planes.T], len(planes)

    def decode(coded: tuple[list[bytes], int]) -> None:
        for frame in coded[0]:
            frames.expand(frame[4:], coded[1])

    return encode, decode, lambda coded: sum(map(len, coded[0]))


def lossless(dtype: str, **options: int) -> Coder:
    codec = Lossless(dtype=dtype, **options)
    shapes: dict[int, tuple[int, ...]] = {}

    def encode(x: mx.array) -> Any:
        parts = codec.encode(x)
        shapes[id(parts["codes"])] = x.shape
        return parts

    def decode(parts: Any) -> None:
        mx.eval(codec.decode(parts, shapes[id(parts["codes"])], DTYPES[dtype]))

    return encode, decode, lambda parts: parts["codes"].nbytes


def coders(dtype: str) -> Iterator[tuple[str, int, Coder]]:
    """Name, level of Zstandard, and coder."""
    yield "pcodec, a layer a chunk", 1, chunked(lambda a: [a.swapaxes(1, 2)])
    yield (
        "pcodec, a channel a chunk",
        1,
        chunked(lambda a: [head[:, i] for head in a for i in range(a.shape[2])]),
    )
    yield "zstd, values as they are", 1, in_planes(False)
    yield "zstd, planes of bytes", 1, in_planes(True)
    yield "lossless, 16 groups", 1, lossless(dtype, groups=16)
    yield "lossless, zstd 3", 3, lossless(dtype)
    yield "lossless, zstd 9", 9, lossless(dtype)
    yield "lossless", 1, lossless(dtype)
    yield "lossless, one group (values)", 1, lossless(dtype, groups=1)


def measure(coder: Coder, tensors: list[mx.array]) -> tuple[float, float, float]:
    """Bits an element; MB a second to encode and to decode."""
    encode, decode, size = coder
    best = [float("inf")] * 2
    for _ in range(3):
        start = time.process_time()
        coded = [encode(x) for x in tensors]
        middle = time.process_time()
        for each in coded:
            decode(each)
        best = [min(best[0], middle - start), min(best[1], time.process_time() - middle)]
    total = sum(x.size for x in tensors)
    speed = sum(x.nbytes for x in tensors) / 1e6
    return 8 * sum(map(size, coded)) / total, speed / best[0], speed / best[1]


def main() -> None:
    """Print a table of all coders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("BF16", "F16", "F32"), default="BF16")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)  # type: ignore[arg-type]  # a device type is one too
    threads.MAX_THREADS = 1
    found = caches(args.tokens)
    print(f"| {args.dtype}, {args.tokens} tokens | keys | values | encode | decode |")
    print("|---|---|---|---|---|")
    for name, level, coder in coders(args.dtype):
        frames.LEVEL = level
        rows = []
        for i in (0, 1):
            tensors = [layer[i].astype(DTYPES[args.dtype]) for layer in found]
            mx.eval(tensors)
            rows.append(measure(coder, tensors))
        keys, values = rows
        speeds = [2 / (1 / keys[i] + 1 / values[i]) for i in (1, 2)]
        print(
            f"| {name} | {keys[0]:.2f} | {values[0]:.2f} | {speeds[0]:.0f} | {speeds[1]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
