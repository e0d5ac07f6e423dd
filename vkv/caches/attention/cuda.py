"""Attend to codes on an NVIDIA GPU, without decoding them into memory.

Blocks take stretches of the past in parallel, codes unpacked in registers and exact tokens
beside them; the last one adds the stretches up. Kernels are compiled when first used, a few
seconds each, and kept by MLX on disk under a name that says what they depend on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple, cast

import mlx.core as mx

from vkv.caches.attention.compiled import kernel_of
from vkv.caches.attention.past import Past
from vkv.caches.attention.sides import WARPS, Template, room, side, stage, unknown

__all__ = ["LONGEST", "Plan", "Program", "refuses"]

#: Head dims that the kernels are made for.
DIMS = (64, 96, 128, 256)
#: New tokens of one call; for more, decoding once is cheaper.
LONGEST = 16
#: Bytes of the codes that a warp takes at a time, at most.
STAGE = 10 << 10
#: Blocks that run at the same time on an H200, two on each of its 132 processors.
BLOCKS = 264
#: Calls of a program that may run at the same time.
TURNS = 64
#: Tokens of a long past, for ``nsnquant``.
SHORT = 16384


class Plan(NamedTuple):
    """Say how the work is cut.

    Attributes:
        unit: Tokens that a warp fetches at a time: 16, 32 or 64.
        step: Those of them that it works on at a time.
        stages: Units that a warp has in shared memory, the one in work included.
        blocks: Most blocks of the grid, which should run at the same time.
        tiles: Tiles of 8 query columns of a block.
        copies: Of a codebook in shared memory.
    """

    unit: int
    step: int
    stages: int
    blocks: int
    tiles: int
    copies: int


def refuses(keys: Past, values: Past, length: int) -> str | None:
    """Say why the kernels cannot take these, or ``None``.

    Args:
        keys, values: Of one layer.
        length: New tokens.
    """
    dim = keys.tail.shape[-1]
    if dim not in DIMS or values.tail.shape[-1] != dim:
        return f"head dims {dim} and {values.tail.shape[-1]}, expected one of {DIMS} for both"
    if length > LONGEST:
        return f"{length} new tokens, expected at most {LONGEST}"
    if (keys.head_tokens, keys.tokens) != (values.head_tokens, values.tokens):
        return "keys and values are coded over different tokens"
    return unknown(keys, "keys") or unknown(values, "values")


class Program:
    """The kernels for one form of layer: codecs, dtypes, head dim, rope, query columns.

    Args:
        keys, values: A layer of that form, of which ``refuses`` says ``None``.
        columns: Query heads of a KV head, times new tokens.
        length: New tokens.
        scale: Multiplies scores.
        causal: Each query sees the tokens up to its own.
        plan: How the work is cut; chosen here if not given.
    """

    def __init__(
        self,
        keys: Past,
        values: Past,
        columns: int,
        length: int,
        scale: float,
        causal: bool,
        plan: Plan | None = None,
    ):
        self._dim, self._dtype = keys.tail.shape[-1], keys.tail.dtype
        self._plan = plan = plan or _plan(keys, values, columns)
        self._columns, self._head = columns, keys.head is not None
        shared = _one_codebook(keys, values)
        self._sides = tuple(
            side(name, past, plan.unit, plan.tiles, plan.copies, shared)
            for name, past in (("keys", keys), ("values", values))
        )
        self._wide = self._dim * self._sides[1].planes + 2
        self._constants = [_numbers(keys, scale), *self._sides[0].constants.values()]
        template: Template = [
            ("T", self._dtype), ("D", self._dim), ("NT", plan.tiles), ("UNIT", plan.unit),
            ("STEP", plan.step), ("STAGES", plan.stages), ("HEAD", self._head),
            ("CAUSAL", causal and length > 1),
            *self._sides[0].template, *self._sides[1].template,
        ]  # fmt: skip
        self._counters: dict[int, cycle[mx.array]] = {}
        self._kernel = kernel_of(self._sides, template, self._head, self._shared())

    def _counter(self, rows: int) -> mx.array:
        """Return a counter of blocks for each of ``rows``: zeros, which every call leaves zeros.

        Calls may run at the same time, so they take turns with some: to make one would cost
        a call a copy from the host.
        """
        if rows not in self._counters:
            made = list(mx.zeros((TURNS, rows), mx.uint32))
            mx.eval(made)
            self._counters[rows] = cycle(made)
        return next(self._counters[rows])

    def _shared(self) -> int:
        """Bytes of shared memory of a block."""
        (keys, values), plan = self._sides, self._plan
        queries = 8 * plan.tiles * self._dim * 4
        rings = WARPS * plan.stages * (keys.stage + values.stage)
        sums = WARPS * 8 * plan.tiles * self._wide * 4
        most = max(rings + keys.tables + values.tables + queries, sums)
        return room(WARPS * plan.stages * 8) + most

    def __call__(self, queries: mx.array, keys: Past, values: Past) -> mx.array:
        """Attend with ``queries`` ``(B, Hq, L, D)``; the result has their shape and dtype."""
        batch, heads, length, dim = shape = queries.shape
        plan, exact = self._plan, keys.tail.shape[2] + keys.head_tokens
        rows = batch * keys.tail.shape[1] * -(-self._columns // (8 * plan.tiles))
        extra = -(-exact // (WARPS * (4 if dim > 128 else 8)))
        units = -(-keys.tokens // plan.unit)
        fair = plan.blocks // rows
        splits = max(1, min(-(-units // WARPS), max(fair - extra, fair // 2)))
        q = queries if queries.dtype == self._dtype else queries.astype(self._dtype)
        inputs = [q, keys.tail, values.tail, self._counter(rows), *self._constants]
        if self._head:
            inputs += (cast(mx.array, keys.head), cast(mx.array, values.head))
        inputs += [keys.parts[name] for _, name in self._sides[0].parts]
        inputs += [values.parts[name] for _, name in self._sides[1].parts]
        _, out = self._kernel(
            inputs=inputs,
            grid=((splits + extra) * WARPS * 32, rows, 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[(batch * heads * length, splits + extra, self._wide), shape],
            output_dtypes=[mx.float32, self._dtype],
        )
        return out if queries.dtype == self._dtype else out.astype(queries.dtype)


def _plan(keys: Past, values: Past, columns: int) -> Plan:
    dim, unit = keys.tail.shape[-1], 64
    tiles = 1 if columns <= 8 or dim > 128 else 2
    for past in (keys, values):
        unit = math.gcd(unit, past.codec.window) if past.codec.window > 1 else unit
    while unit > 16 and sum(stage(past, unit) for past in (keys, values)) > STAGE:
        unit //= 2
    vectors = any(past.codec.id == "nsnquant" for past in (keys, values))
    step = 16 if vectors and (dim > 128 or tiles > 1) else 32 if vectors or tiles > 1 else 64
    if vectors and is_short(keys):
        return Plan(min(unit, 32), min(unit, step), 2, BLOCKS, tiles, 1)
    # With eight copies, no two lanes that look up codewords together need the same bank.
    return Plan(unit, min(unit, step), 2, BLOCKS, tiles, 8 if _one_codebook(keys, values) else 4)


def is_short(past: Past) -> bool:
    """Return whether warps get so few tokens that tables would take longer to load."""
    return past.tokens < SHORT


def _one_codebook(keys: Past, values: Past) -> bool:
    one, two = (past.parts.get("codebook") for past in (keys, values))
    return one is not None and two is not None and bool(mx.array_equal(one, two))


@lru_cache(maxsize=256)
def _scales(scale: float, mscale: float, spacing: float) -> mx.array:
    per_bit = scale * math.log2(math.e)
    numbers = mx.array([per_bit * mscale, per_bit, spacing])
    mx.eval(numbers)
    return numbers


def _numbers(keys: Past, scale: float) -> mx.array:
    """Scales of scores, for exponents of 2, of coded and of exact keys; spacing of positions."""
    rope = keys.rope
    return _scales(scale, 1.0, 1.0) if rope is None else _scales(scale, rope.mscale, rope.scale)
