"""Ropes undone and redone, and where the rows of a ring stand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from vkv.caches.positions import runs
from vkv.caches.rope import rotate, usable
from vkv.errors import CacheError, HeaderError, VkvError
from vkv.format.positions import MAX_POSITION, ring_positions
from vkv.format.schema import Rope
from vkv.identity.ropes import _READERS, _class

DIM = 64
LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 8192}
LAYERS: dict[str, Any] = {
    "plain": nn.RoPE(DIM),
    "traditional, partial": nn.RoPE(32, traditional=True, base=1e6),
    "linear": nn.RoPE(DIM, scale=1 / 8),
    "llama3": Llama3RoPE(DIM, 131_072, False, 500_000.0, LLAMA3),
    "llama3, traditional": Llama3RoPE(DIM, 131_072, True, 500_000.0, LLAMA3),
    "yarn, mscale": YarnRoPE(DIM, False, 131_072, 1e6, 40.0, 4096, mscale=1.0, mscale_all_dim=0.5),
    "yarn, traditional, partial": YarnRoPE(32, True, 131_072, 1e4, 4.0, 4096),
    "longrope, partial": SuScaledRoPE(48, 1e4, 131_072, 4096, 1.0, [1.0 + i for i in range(24)]),
    "proportional": ProportionalRoPE(DIM, 16, False, 1e6),  # the other frequencies are infinite
}
ROPES: dict[str, Rope] = {name: _READERS[_class(x)](x) for name, x in LAYERS.items()}
PLAIN = ROPES["plain"]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def keys(rows: int = 16, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (4 * mx.random.normal((1, 2, rows, DIM), key=mx.random.key(1))).astype(dtype)


def error(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max() / mx.abs(b).max())


@pytest.mark.parametrize("offset", [0, 1, 4095, 131_072, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_forward_has_the_bits_of_the_layer_and_undoes_itself(
    name: str, dtype: mx.Dtype, offset: int
) -> None:
    x, rope = keys(dtype=dtype), ROPES[name]
    there = rotate(x, rope, offset)
    assert there.dtype == mx.float32
    assert mx.array_equal(there, LAYERS[name](x.astype(mx.float32), offset=offset))
    assert error(rotate(there, rope, offset, inverse=True), x) < 1e-6
    assert error(rotate(rotate(x, rope, offset, inverse=True), rope, offset), x) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_cached_keys_come_back_to_the_last_bit_or_the_next(name: str, dtype: mx.Dtype) -> None:
    """What the model cached in 16 bits, undone and redone in 32, and cast again."""
    cached, rope = LAYERS[name](keys(256, dtype), offset=100_000), ROPES[name]
    back = rotate(rotate(cached, rope, 100_000, inverse=True), rope, 100_000).astype(dtype)
    steps = mx.abs(back.view(mx.int16).astype(mx.int32) - cached.view(mx.int16).astype(mx.int32))
    near_zero = mx.abs(cached) < 1e-3
    assert mx.where(near_zero, 0, steps).max() <= 1
    assert (back == cached).mean() > 0.999


@pytest.mark.parametrize("name", ["plain", "llama3, traditional", "longrope, partial"])
def test_coarse_sines_cancel_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal computes sines to about 12 bits, and worse far out. Here, to 8."""
    monkeypatch.setattr(mx.fast, "rope", coarse_rope)
    x, rope = keys(), ROPES[name]
    once = coarse_rope(x, rope.dims, traditional=rope.traditional, base=rope.base, scale=-1.0,
        offset=70_000, freqs=None if rope.freqs is None else mx.array(rope.freqs))  # fmt: skip
    there = rotate(x, rope, 70_000)
    assert error(rotate(once, rope, 70_000), x) > 1e-3  # the negated scale alone is not enough
    assert error(rotate(there, rope, 70_000, inverse=True), x) < 1e-6
    assert usable(rope, there, 70_000)


def coarse_rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int,
    freqs: mx.array | None,
) -> mx.array:
    if freqs is None:
        freqs = mx.array(base) ** (mx.arange(0, dims, 2) / dims)
    where = (offset + mx.arange(x.shape[-2], dtype=mx.float32)) * scale
    angles = where[:, None] * (1 / freqs)
    cos, sin = (mx.round(f(angles) * 256) / 256 for f in (mx.cos, mx.sin))
    half = dims // 2
    pairs = (
        (x[..., :dims:2], x[..., 1:dims:2]) if traditional else (x[..., :half], x[..., half:dims])
    )
    a, b = pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos
    turned = mx.stack([a, b], axis=-1).reshape(*x.shape[:-1], dims)
    if not traditional:
        turned = mx.concatenate([a, b], axis=-1)
    return mx.concatenate([turned, x[..., dims:]], axis=-1)


def test_channels_beyond_dims_are_left_alone() -> None:
    x = keys()
    there = rotate(x, ROPES["yarn, traditional, partial"], 9)
    assert mx.array_equal(there[..., 32:], x[..., 32:])
    assert not mx.allclose(there[..., :32], x[..., :32])


PLACES: dict[str, Any] = {
    "range": range(5, 21),
    "list": list(range(5, 21)),
    "numpy": np.arange(5, 21),
    "mlx": mx.arange(5, 21),
}


@pytest.mark.parametrize("name", PLACES)
def test_positions_in_any_form(name: str) -> None:
    assert mx.array_equal(rotate(keys(), PLAIN, PLACES[name]), rotate(keys(), PLAIN, 5))
    assert runs(PLACES[name], 16) == [range(5, 21)]


ORDERS = [
    [0, 1, 2, 3, 40, 41, 42, 43, 44, 30, 31, 32, 33, 34, 35, 36],
    list(range(15, -1, -1)),
    [7] * 16,
    range(0, 32, 2),
]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", ["plain", "yarn, mscale"])
@pytest.mark.parametrize("where", ORDERS)
def test_each_row_is_rotated_by_its_own_position(where: Any, name: str, inverse: bool) -> None:
    x, rope = keys(), ROPES[name]
    rows = [rotate(x[..., i : i + 1, :], rope, p, inverse=inverse) for i, p in enumerate(where)]
    found = rotate(x, rope, where, inverse=inverse)
    assert mx.array_equal(found, mx.concatenate(rows, axis=-2))


def test_a_part_has_the_bits_of_the_whole() -> None:
    x, where = keys(), ORDERS[0]
    whole = rotate(x, PLAIN, where)
    assert mx.array_equal(rotate(x[..., 6:13, :], PLAIN, where[6:13]), whole[..., 6:13, :])


def test_no_rows() -> None:
    for rope in ROPES.values():
        assert rotate(keys(0), rope, ()).shape == (1, 2, 0, DIM)
        assert rotate(keys(0), rope, 7, inverse=True).dtype == mx.float32
    assert usable(PLAIN, keys(0), 0)


BAD_PLACES: dict[str, Any] = {
    "too few": range(15),
    "too many": list(range(17)),
    "negative": -1,
    "past int32": MAX_POSITION - 14,
    "far past": 1 << 47,
    "past int64": 1 << 70,
    "one past int32": [*range(15), 1 << 40],
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_bad_positions_are_refused(name: str) -> None:
    with pytest.raises(CacheError, match="expected") as exc:
        rotate(keys(), PLAIN, BAD_PLACES[name])
    assert exc.value.rule == "L5"
    assert not usable(PLAIN, keys(), BAD_PLACES[name])


BAD_ROPES: dict[str, Rope] = {
    "odd dims": Rope(dims=33, base=1e4),
    "more dims than channels": Rope(dims=DIM + 2, base=1e4),
    "huge dims": Rope(dims=1 << 16, base=1e4),
    "neither base nor freqs": Rope(dims=DIM),
    "base and freqs": Rope(dims=2, base=1e4, freqs=(1.0,)),
    "too few freqs": Rope(dims=DIM, freqs=(1.0,) * 31),
    "base 0": Rope(dims=DIM, base=0.0),
    "mscale 0": Rope(dims=DIM, base=1e4, mscale=0.0),
    "scale nan": Rope(dims=DIM, base=1e4, scale=math.nan),
    "base below 0": Rope(dims=DIM, base=-1e4),
    "base past float32": Rope(dims=DIM, base=1e39),
    "freqs 0": Rope(dims=2, freqs=(0.0,)),
    "freqs nan": Rope(dims=2, freqs=(math.nan,)),
    "freqs that float32 has not": Rope(dims=2, freqs=(1e-310,)),
    "mscale infinite": Rope(dims=DIM, base=1e4, mscale=math.inf),
}


@pytest.mark.parametrize("name", BAD_ROPES)
def test_bad_ropes_are_refused(name: str) -> None:
    with pytest.raises(HeaderError, match="expected") as exc:
        rotate(keys(), BAD_ROPES[name], 0)
    assert exc.value.rule == "H2"
    assert not usable(BAD_ROPES[name], keys(), 0)


@given(
    st.builds(
        Rope,
        dims=st.integers(2, 70),
        traditional=st.booleans(),
        base=st.none() | st.floats(),
        freqs=st.none() | st.lists(st.floats(), max_size=4).map(tuple),
        scale=st.floats(),
        mscale=st.floats(),
    ),
    st.lists(st.integers(-2, 1 << 65), min_size=2, max_size=2),
)
@settings(max_examples=200, deadline=None)
def test_a_hostile_rope_raises_only_our_errors(rope: Rope, where: list[int]) -> None:
    try:
        mx.eval(rotate(keys(2), rope, where))
    except VkvError:
        assert not usable(rope, keys(2), where)


@pytest.mark.parametrize("name", ROPES)
def test_usable(name: str) -> None:
    assert usable(ROPES[name], LAYERS[name](keys(), offset=3), 3)
    assert usable(ROPES[name], keys(100, mx.bfloat16), range(100))


UNFIT: dict[str, mx.array] = {
    "infinite, last row": keys().at[..., -1, 3].add(mx.inf),
    "not a number": keys().at[..., 0, 0].add(mx.nan),
    "integers": keys().astype(mx.int32),
    "one axis short": keys()[0],
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_keys_are_not_usable(name: str) -> None:
    assert not usable(PLAIN, UNFIT[name], 0)


def test_a_rope_that_loses_the_keys_is_not_usable() -> None:
    assert not usable(msgspec.structs.replace(PLAIN, mscale=1e-42), keys(), 0)
    assert not usable(msgspec.structs.replace(PLAIN, scale=1e38), keys(), 100)


STEPS = {
    "one by one": [1] * 40,
    "prefill below": [5, 1, 1, 1],
    "prefill to the brim": [12, 1, 1],
    "one short, then one": [11, 1, 1, 1],
    "prefill past": [30],
    "prefill past, then one by one": [30, *[1] * 20],
    "chunks": [7, 7, 7, 7],
    "chunks and ones": [5, 1, 9, 1, 1, 20, 1, *[1] * 15, 3],
    "ones, then a chunk": [*[1] * 17, 4, 1, 1],
}


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("name", STEPS)
def test_ring_positions_are_where_tokens_are(name: str, keep: int) -> None:
    for cache in filled(STEPS[name], 12, keep):
        check_ring(cache)


@given(st.integers(6, 20), st.integers(0, 4), st.lists(st.integers(1, 30), max_size=25))
@settings(max_examples=60, deadline=None)
def test_ring_positions_in_any_mix(size: int, keep: int, steps: list[int]) -> None:
    for cache in filled([max(1, s - 15) for s in steps], size, keep):
        check_ring(cache)


def test_ring_positions_after_trimming() -> None:
    *_, cache = filled([3, 1, 1, 1, 1], 12, 0)
    cache.trim(4)
    check_ring(cache)


def filled(steps: list[int], size: int, keep: int) -> Iterator[RotatingKVCache]:
    """A cache whose keys are their own positions, after each step."""
    cache = RotatingKVCache(size, keep=keep)
    for step in steps:
        x = mx.arange(cache.offset, cache.offset + step, dtype=mx.float32).reshape(1, 1, -1, 1)
        cache.update_and_fetch(x, x)
        yield cache


def check_ring(cache: RotatingKVCache) -> None:
    rows = min(cache.offset, cache.keys.shape[2])
    where = ring_positions(rows, cache.offset, cache.keep, cache._idx)
    assert list(where) == cache.keys[0, 0, :rows, 0].tolist()
    assert len(runs(where, rows)) <= 3
    for start in range(0, rows, 3):
        assert list(where[start : start + 5]) == list(where)[start : start + 5]
    assert list(where[-3:]) == list(where)[-3:]


@pytest.mark.parametrize(
    ("length", "offset", "keep", "idx"),
    [(8, 7, 0, 8), (8, 20, 4, 3), (8, 20, 4, 9), (8, 20, 9, 9), (-1, 20, 0, 0), (8, 20, 0, -1)],
)
def test_numbers_that_no_ring_has(length: int, offset: int, keep: int, idx: int) -> None:
    with pytest.raises(CacheError) as exc:
        ring_positions(length, offset, keep, idx)
    assert exc.value.rule == "L5"
