"""Rows of packed caches in every form that attention on codes takes, and what is right."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from vkv.caches.attention.past import Past
from vkv.caches.rope import rotate
from vkv.codecs import registry
from vkv.codecs.protocol import NAMES
from vkv.format.schema import Rope


class Variant(NamedTuple):
    """One layer, and the queries of one call.

    Attributes:
        keys, values: Codec strings.
        dim: Head dim.
        dtype: Of exact tokens and queries.
        length: New tokens.
        shape: Sequences, KV heads, query heads of each.
        tokens: Exact ones before the codes, coded ones, and exact ones behind them.
        rope: Keys are coded without it.
    """

    keys: str
    values: str
    dim: int = 128
    dtype: mx.Dtype = mx.float16
    length: int = 1
    shape: tuple[int, int, int] = (1, 2, 4)
    tokens: tuple[int, int, int] = (0, 320, 5)
    rope: bool = False

    def __str__(self) -> str:
        """Return the name of the test."""
        dtype = str(self.dtype).rpartition(".")[2]
        rope = "-rope" if self.rope else ""
        sizes = "x".join(map(str, (*self.shape, self.length)))
        return f"{self.keys}-{self.values}-{self.dim}-{dtype}-{sizes}{rope}"


def _affine(bits: int, other: int = 0, group: int = 64) -> tuple[str, str]:
    return f"affine:bits={bits},group={group}", f"affine:bits={other or bits},group={group}"


NSN2, NSN1 = "nsnquant:bits=2", "nsnquant:bits=1"
AFFINE = [
    *(Variant(*_affine(bits)) for bits in (2, 3, 4, 5, 6, 8)),
    *(Variant(*_affine(4, 8, group), dim) for group in (32, 64) for dim in (64, 128, 256)),
    *(Variant(*_affine(bits, 4, 32), 96, tokens=(0, 77, 3)) for bits in (2, 3, 4, 6, 8)),
    Variant(*_affine(4, 2, 128), 256, shape=(1, 1, 8), tokens=(1, 1001, 33)),
    Variant(*_affine(4), dtype=mx.bfloat16, shape=(1, 8, 4), tokens=(3, 2051, 70)),
    Variant(*_affine(4), length=3, shape=(2, 2, 4), tokens=(2, 333, 9)),
    Variant(*_affine(8), 64, length=16, shape=(2, 3, 3), tokens=(0, 200, 40)),
]
NSNQUANT = [
    *(Variant(c, c, dim, rope=rope) for c in (NSN2, NSN1) for dim in (64, 128)
      for rope in (False, True)),
    Variant(NSN2, NSN2, 256, rope=True, shape=(1, 1, 8), tokens=(4, 192, 33)),
    Variant(NSN2, NSN2, rope=True, dtype=mx.bfloat16, shape=(1, 8, 4), tokens=(3, 2048, 70)),
    Variant(NSN2, NSN2, rope=True, length=4, shape=(2, 2, 4), tokens=(1, 128, 9)),
    Variant("nsnquant:bits=1,window=32", NSN2, 64, rope=True, tokens=(0, 256, 1)),
    Variant(NSN2, "affine:bits=4", rope=True),
    Variant("affine:bits=4", NSN1),
]  # fmt: skip
VARIANTS = [*AFFINE, *NSNQUANT]


class Case(NamedTuple):
    """What a variant is made of, and the output in float32."""

    queries: mx.array
    keys: Past
    values: Past
    scale: float
    right: mx.array


def case(variant: Variant, seed: int = 0) -> Case:
    """Make the rows of a variant, and attend to them decoded, in float32."""
    mx.random.seed(seed)
    batch, heads, group = variant.shape
    shape = (batch, heads, sum(variant.tokens), variant.dim)
    means = 2 * mx.random.normal((2, batch, heads, 1, variant.dim))
    rope = Rope(dims=variant.dim, base=1e4, scale=0.5) if variant.rope else None
    keys, k = _past(variant, "keys", mx.random.normal(shape) + means[0], rope)
    values, v = _past(variant, "values", 2 * mx.random.normal(shape) + means[1], None)
    queries = mx.random.normal((batch, heads * group, variant.length, variant.dim))
    queries, scale = queries.astype(variant.dtype), variant.dim**-0.5
    mask = "causal" if variant.length > 1 else None
    right = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32), k, v, scale=scale, mask=mask
    )
    mx.eval(queries, right)
    return Case(queries, keys, values, scale, right)


def _past(variant: Variant, name: str, x: mx.array, rope: Rope | None) -> tuple[Past, mx.array]:
    head, coded, _ = variant.tokens
    x = x.astype(variant.dtype)
    codec = registry.parse(getattr(variant, name)).configure(name, NAMES[x.dtype])
    ends = mx.split(x, [head, head + coded], axis=2)
    middle = mx.contiguous(ends[1])
    parts = codec.encode(middle)
    decoded = codec.decode(parts, middle.shape, mx.float32)
    if rope is not None:
        decoded = rotate(decoded, rope, head)
    exact = mx.contiguous(ends[0]) if head else None
    past = Past(codec, parts, coded, mx.contiguous(ends[2]), exact, rope)
    wide = [ends[0].astype(mx.float32), decoded, ends[2].astype(mx.float32)]
    return past, mx.concatenate(wide, axis=2)


def error(found: mx.array, case: Case) -> float:
    """Return the error of ``found``, relative to what is right."""
    assert found.dtype == case.queries.dtype
    assert found.shape == case.right.shape
    off = found.astype(mx.float32) - case.right
    return float(mx.sqrt((off * off).sum() / (case.right * case.right).sum()))
