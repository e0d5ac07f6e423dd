"""Decode ``nsnquant`` and ``kvquant``, and search codewords, with one CUDA kernel each.

A decoder writes all tokens of a packed cache at once: those stored exactly before and
after the coded ones, and the coded ones, with their rotary embedding if it was taken
off. So each value is written once, where plain operations write it five times.

Kernels are made for the common sizes; elsewhere the answer is ``None``, and callers use
plain operations. MLX keeps what it compiles under the kernel's name, which therefore
names everything the code depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from hashlib import sha256
from importlib import resources
from typing import Any, cast

import mlx.core as mx

from vkv.codecs.protocol import ALONE, FusedContext, Parts
from vkv.format.schema import Rope

__all__ = ["kvquant", "nearest", "nsnquant"]

#: Threads of a block (``CHUNK`` in ``kvquant.cu``).
THREADS = 256
#: Blocks of ``kvquant``, each of which loads all levels: four for each processor of an H200.
BLOCKS = 528
#: Bytes of decoded values that a block works on, those it may at most, and its memory.
TILE, LARGEST_TILE, SHARED = 1 << 15, 1 << 16, 160 << 10
#: Tokens of a tile at most.
TOKENS = 64
#: Vectors that a block searches for: ``EACH`` in ``search.cu`` for every thread.
SEARCHED = 4 * THREADS

Template = list[tuple[str, Any]]


def nsnquant(
    parts: Parts,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    window: int,
    context: FusedContext = ALONE,
) -> mx.array | None:
    """Decode ``nsnquant`` to ``shape`` ``(B, H, T, D)``, with the bits of plain operations."""
    dim, subvector = shape[-1], parts["codebook"].shape[-1]
    if subvector != 8 or dim not in (32, 64, 128, 256):
        return None
    fine, signs = "s1_range" not in parts, parts.get("signs", parts["indices"])
    ranges = [parts.get(name, parts["s2"]) for name in ("s1_range", "o_range")]
    names = ["codebook", "indices", "signs", "s2", "s1", "o", "s1_range", "o_range"]
    arrays = [parts["codebook"], parts["indices"], signs, parts["s2"], parts["s1"], parts["o"]]
    template = [("WINDOW", window), ("SIGNS", "signs" in parts), ("FINE", fine)]
    windows = (_step(shape, dtype) + window - 2) // window + 1
    memory = 4096 + 4 * windows * shape[0] * shape[1] * dim
    return _decode("nsnquant", names, arrays + ranges, template, shape, dtype, context, memory)


def kvquant(
    parts: Parts,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    bits: int,
    table: str,
    context: FusedContext = ALONE,
) -> mx.array | None:
    """Decode ``kvquant`` to ``shape`` ``(B, H, T, D)``, with the bits of plain operations."""
    batch, heads, _, dim = shape
    if dim % 8:
        return None
    codes, levels, sparse = parts["codes"], parts["levels"], "gaps" in parts
    wide = dim + -(-dim // 64) * 4
    memory = batch * heads * wide * dtype.size << bits if table == "channel" else 0
    scaled = [parts.get(name, codes) for name in ("scales", "offsets")]
    listed = [parts["gaps"], _starts(parts["gaps"]), parts["outliers"]] if sparse else [codes] * 3
    if sparse and not parts["outliers"].size:
        sparse, listed = False, [codes] * 3
    names = ["codes", "levels", "scales", "offsets", "gaps", "starts", "outliers"]
    how = ("channel", "token", "shared").index(table)
    template = [("BITS", bits), ("TABLE", how), ("SPARSE", sparse)]
    arrays = [codes, levels, *scaled, *listed]
    return _decode("kvquant", names, arrays, template, shape, dtype, context, memory)


def nearest(x: mx.array, rows: mx.array) -> mx.array:
    """Return the index of the best codeword, U8 ``(N,)``, of vectors F32 ``(N, V)``.

    Args:
        x: Rounded to multiples of 1/128 for the comparison.
        rows: F32 ``(K, V + 1)``: whole numbers, codewords times 256 and half their norms.
    """
    count, dim = x.shape
    kernel = _kernel("search", ("x", "rows"), 4 * len(rows) * (dim + 4))
    (indices,) = kernel(
        inputs=[x, rows],
        template=[("V", dim)],
        grid=(-(-count // SEARCHED) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[mx.uint8],
    )
    return indices


def _decode(
    name: str, names: list[str], arrays: list[mx.array], template: Template,
    shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext, table: int,
) -> mx.array | None:  # fmt: skip
    """Run decoder ``name``, which needs ``table`` bytes beside its tile."""
    batch, heads, tokens, dim = shape
    wide = batch * heads * dim * dtype.size
    turning = _turning(context.rope, dim)
    step = _step(shape, dtype)
    shared = table + step * wide
    if wide > LARGEST_TILE or shared > SHARED or turning is None:
        return None
    ends = [x if x is not None and x.shape[2] else None for x in (context.head, context.tail)]
    total = tokens + sum(x.shape[2] for x in ends if x is not None)
    rope, turn, freqs = turning
    inputs = [*arrays, *(turn if x is None else x for x in ends), turn, freqs]
    flags = [("HEAD", ends[0] is not None), ("TAIL", ends[1] is not None)]
    kernel = _kernel(name, (*names, "head", "tail", "turn", "freqs"), shared)
    (out,) = kernel(
        inputs=inputs,
        template=[("T", dtype), ("D", dim), ("TOKENS", step), *template, *flags, *rope],
        grid=(min(BLOCKS if name == "kvquant" else total, -(-total // step)) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, heads, total, dim)],
        output_dtypes=[dtype],
    )
    return out


def _step(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    """Return the number of tokens of a tile."""
    return max(1, min(TOKENS, TILE // (shape[0] * shape[1] * shape[3] * dtype.size)))


@lru_cache(maxsize=16)
def _turning(rope: Rope | None, dim: int) -> tuple[Template, mx.array, mx.array] | None:
    """Return constants, scalars and ``freqs`` of ``rope``; ``None`` if kernels do not rotate so."""
    if rope is None:
        return [("ROPE", 0), ("DIMS", 16), ("FREQS", False)], mx.zeros(3), mx.zeros(1)
    if rope.dims % 16 or rope.dims > dim:
        return None
    template = [("ROPE", 2 if rope.traditional else 1), ("DIMS", rope.dims)]
    template.append(("FREQS", rope.freqs is not None))
    turn = [rope.scale, math.log2(rope.base or 1.0), rope.mscale]
    arrays = mx.array(turn, mx.float32), mx.array(rope.freqs or [0.0], mx.float32)
    mx.eval(arrays)
    return template, *arrays


def _starts(gaps: mx.array) -> mx.array:
    """Return elements and outliers before each chunk of 256 gaps, I32 ``(2, chunks)``."""
    chunks = -(-gaps.size // THREADS)
    (sums,) = _kernel("gaps", ("gaps",), 0)(
        inputs=[gaps],
        grid=(chunks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(2, chunks)],
        output_dtypes=[mx.int32],
    )
    return mx.cumsum(sums, axis=1, inclusive=False)


@cache
def _kernel(name: str, inputs: tuple[str, ...], shared: int) -> Callable[..., list[mx.array]]:
    files, body = _SOURCES[name]
    folder = resources.files("vkv.codecs.kernels").joinpath("source")
    text = "\n".join(folder.joinpath(file).read_text() for file in files)
    kernel: Any = mx.fast.cuda_kernel(
        name=f"vkv_{name}_{sha256((text + body).encode()).hexdigest()[:12]}_{shared}",
        input_names=list(inputs),
        output_names=["out"],
        header=f"namespace vkv {{\n{text}\n}}\n",
        source=body,
        shared_memory=shared,
    )
    return cast(Callable[..., list[mx.array]], kernel)


#: Of each kernel: its files, and the body that calls what they define.
_SPAN = """
    vkv::Span span{codes_shape[0] * codes_shape[1], HEAD ? head_shape[2] : 0, codes_shape[2],
                   TAIL ? tail_shape[2] : 0};
    auto before = reinterpret_cast<const T*>(head), after = reinterpret_cast<const T*>(tail);
"""
_SOURCES = {
    "nsnquant": (
        ("tile.cuh", "nsnquant.cu"),
        _SPAN.replace("codes", "indices")
        + """
    constexpr bool CLIP = vkv::Same<T, __half>::value;
    using Parts = vkv::Nsn<T, D, WINDOW, SIGNS, FINE, CLIP>;
    Parts parts{codebook, s2, reinterpret_cast<const __half*>(s1_range),
        reinterpret_cast<const __half*>(o_range), indices, signs, s1, o};
    vkv::nsn_decode<Parts, T, D, TOKENS, ROPE, DIMS, FREQS>(
        parts, codebook_shape[0], span, before, after, turn, freqs, out);
""",
    ),
    "kvquant": (
        ("tile.cuh", "kvquant.cu"),
        _SPAN
        + """
    vkv::Kv<T, D, BITS, TABLE> parts{codes, levels, reinterpret_cast<const uint8_t*>(scales),
        reinterpret_cast<const int8_t*>(offsets)};
    vkv::Outliers list{reinterpret_cast<const uint8_t*>(gaps), reinterpret_cast<const int*>(starts),
        reinterpret_cast<const __half*>(outliers), SPARSE ? gaps_shape[0] : 0,
        SPARSE ? starts_shape[1] : 0};
    vkv::kv_decode<T, D, TOKENS, BITS, TABLE, SPARSE, ROPE, DIMS, FREQS>(
        parts, list, span, before, after, turn, freqs, out);
""",
    ),
    "gaps": (
        ("tile.cuh", "kvquant.cu"),
        "vkv::gap_sums(gaps, gaps_shape[0], (gaps_shape[0] + 255) / 256, out);",
    ),
    "search": (("search.cu",), "vkv::search<V>(x, rows, x_shape[0], rows_shape[0], out);"),
}
