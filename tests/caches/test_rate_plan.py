"""Codecs that plan: every tensor gets its own step, and the file the bits asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

import vkv
from fixtures.models import tiny
from vkv.caches.rope import rotate
from vkv.codecs.protocol import Piece
from vkv.codecs.registry import parse
from vkv.errors import CodecError
from vkv.format.layers import walk
from vkv.format.schema import Layer, Segment

TOKENS = 400
MODEL = tiny.llama(layers=3)


def rows(seed: int, tokens: int) -> mx.array:
    """Keys or values whose channels hang together, ``(1, 2, tokens, 32)``."""
    random = np.random.default_rng(seed)
    mix = random.standard_normal((32, 32)) * np.exp2(-np.arange(32) / 3)[:, None]
    x = random.standard_normal((1, 2, tokens, 32)) @ mix + random.standard_normal(32)
    return mx.array(x.astype(np.float16))


def grow(cache: Any, seed: int, tokens: int = TOKENS) -> Any:
    cache.update_and_fetch(rows(2 * seed, tokens), rows(2 * seed + 1, tokens))
    return cache


def caches(tokens: int = TOKENS) -> list[Any]:
    return [grow(KVCache(), i, tokens) for i in range(3)]


def save(path: Path, cache: list[Any], codec: Any = "tc:bits=3", **options: Any) -> vkv.Info:
    options = {"model": MODEL} | options
    return vkv.save(path, cache, codec=codec, **options)


def coded(info: vkv.Info, codec: str = "tc") -> list[tuple[str, Segment]]:
    """Segments of one codec, with the name of their tensor."""
    layers: Iterable[Layer] = (layer for _, layer in walk(info.header.layers))
    return [
        (name, segment)
        for layer in layers
        for name, tensor in sorted(layer.tensors.items())
        for segment in tensor.segments
        if segment.codec == codec
    ]


def steps(info: vkv.Info) -> list[Any]:
    return [segment.params["step"] for _, segment in coded(info)]


@pytest.mark.parametrize("bits", [2.5, 4.0])
def test_a_file_has_the_bits_asked_for(tmp_path, bits):
    """All in: sinks, tables, tokens and the header too."""
    tokens = 2000  # of these the header is a twentieth of a bit
    info = save(tmp_path / "a.vkv", caches(tokens), f"tc:bits={bits}", tokens=range(tokens))
    assert info.accounting.bits == pytest.approx(bits, rel=0.01)
    assert {s.params["bits"] for _, s in coded(info)} == {bits}  # asked; accounting: came out
    assert len(set(steps(info)[1::2])) == 3  # earlier layers finer


def test_the_plan_is_that_of_keys_without_their_rope(tmp_path):
    cache = caches()
    info = save(tmp_path / "a.vkv", cache, "tc:step=0.5")
    rope = info.header.ropes[0]
    pieces = []
    for i, c in enumerate(cache):
        keys = rotate(c.keys[..., :TOKENS, :], rope, range(TOKENS), inverse=True)
        pieces += [
            Piece(i, True, keys.astype(mx.float16)),
            Piece(i, False, c.values[..., :TOKENS, :]),
        ]
    codec = parse("tc:step=0.5").configure("keys", "F16")
    assert steps(info) == [p.codec.step for p in codec.plan(pieces)]
    assert [(name, s.rope) for name, s in coded(info)] == [("keys", 0), ("values", None)] * 3


def test_without_a_model_keys_stay_rotated(tmp_path):
    info = save(tmp_path / "a.vkv", caches(), model=None)
    assert {(s.rope, s.params["pre_rope"]) for _, s in coded(info)} == {(None, False)}
    assert len(set(steps(info)[1::2])) == 3  # earlier layers finer


@pytest.mark.parametrize(
    ("codec", "tensors"),
    [
        ({"keys": "tc:bits=3", "values": "affine:bits=4,group=32"}, {"keys"}),
        ({"keys": "affine:bits=4,group=32", "values": "tc:bits=3"}, {"values"}),
        ({"keys": "tc:bits=3"}, {"keys"}),
    ],
)
def test_beside_another_codec(tmp_path, codec, tensors):
    info = save(tmp_path / "a.vkv", caches(2000), codec)
    assert {name for name, _ in coded(info)} == tensors
    (name,) = tensors
    # its own parts, and half of the header
    assert 2.8 < info.accounting.groups[name].bits < 3.0


def test_keys_and_values_with_bits_of_their_own(tmp_path):
    info = save(tmp_path / "a.vkv", caches(2000), {"keys": "tc:bits=2", "values": "tc:bits=4"})
    groups = info.accounting.groups
    assert 1.8 < groups["keys"].bits < 2.0
    assert 3.8 < groups["values"].bits < 4.0


def test_a_grown_cache_keeps_its_codes_and_plans_for_the_rest(tmp_path):
    first = save(tmp_path / "a.vkv", caches(), "tc:bits=6")
    cache = vkv.load(tmp_path / "a.vkv").cache
    for i, c in enumerate(cache):
        grow(c, i + 9)
    info = save(tmp_path / "b.vkv", cache, "tc:bits=3")
    old, new = coded(info)[::2], coded(info)[1::2]
    stored = [{p: i.header.tensors[n].digest for p, n in s.parts.items()}
              for i, found in ((first, coded(first)), (info, old)) for _, s in found]  # fmt: skip
    assert stored[:6] == stored[6:]
    assert {s.tokens for _, s in old} == {TOKENS - 4}
    assert {s.tokens for _, s in new} == {TOKENS}  # without sinks
    assert all(b.params["step"] > a.params["step"] for (_, a), (_, b) in zip(old, new, strict=True))
    added = info.size - first.size
    assert 8 * added / (6 * 2 * 32 * TOKENS) == pytest.approx(3, rel=0.02)


def test_a_few_new_tokens_stay_raw_and_out_of_the_plan(tmp_path):
    save(tmp_path / "a.vkv", caches())
    cache = vkv.load(tmp_path / "a.vkv").cache
    for c in cache:
        grow(c, 9, 20)
    info = save(tmp_path / "b.vkv", cache, model=None)
    assert [s.tokens for _, s in coded(info)] == [TOKENS - 4] * 6
    assert [s.tokens for _, s in coded(info, "raw")] == [4, 20] * 6


def test_layers_that_refuse_are_left_out(tmp_path):
    state = ArraysCache(1)
    state[0] = rows(5, 3)
    whole = grow(KVCache(), 1)
    other = grow(KVCache(), 2)
    broken = KVCache()
    broken.update_and_fetch(rows(3, TOKENS), mx.zeros((1, 2, TOKENS, 0), mx.float16))
    cache = [state, CacheList(whole, other), broken, KVCache()]
    info = save(tmp_path / "a.vkv", cache, model=None, force=True)
    assert [name for name, _ in coded(info)] == ["keys", "values", "keys", "values", "keys"]
    assert len(info.notes) >= 2
    got = vkv.load(tmp_path / "a.vkv").cache
    assert mx.array_equal(got[0][0], state[0])


def test_a_rate_too_low_for_any_reader_is_kept_above_it(tmp_path):
    info = save(tmp_path / "a.vkv", caches(2000), "tc:bits=0.05", force=True)
    assert vkv.validate(tmp_path / "a.vkv", deep=True).ok
    assert info.accounting.bits > 0.125


def test_zeros_are_left_raw(tmp_path):
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 5000, 32)), rows(1, 5000).astype(mx.float32))
    info = save(tmp_path / "a.vkv", [cache], model=None)
    assert info.notes == ["0 keys: asked for tc:bits=3, stored raw: its values are all the same"]
    assert not vkv.load(tmp_path / "a.vkv").cache[0].keys.any()


def test_nothing_to_plan_for(tmp_path):
    assert coded(save(tmp_path / "a.vkv", [KVCache()] * 3)) == []


def test_the_same_cache_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"{name}.vkv", caches())
    assert (tmp_path / "a.vkv").read_bytes() == (tmp_path / "b.vkv").read_bytes()


def test_converting_plans_as_saving_does(tmp_path):
    save(tmp_path / "raw.vkv", caches(), "raw")
    want = save(tmp_path / "a.vkv", caches())
    got = vkv.convert(tmp_path / "raw.vkv", tmp_path / "b.vkv", codec="tc:bits=3")
    assert steps(got) == pytest.approx(steps(want), rel=0.01)


@pytest.mark.parametrize("tokens", [70, 100])
def test_a_prompt_too_short_for_its_rate_is_refused_before_anything_is_written(tmp_path, tokens):
    with pytest.raises(CodecError) as caught:
        save(tmp_path / "a.vkv", caches(tokens), "tc:bits=2")
    assert caught.value.at == "tc.bits"
    assert "asked for tc:bits=2, refused: only" in str(caught.value)
    assert "with force=True (--force)" in str(caught.value)
    assert f"only {tokens} tokens" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_short_prompt_is_saved_by_force_or_by_its_step(tmp_path):
    forced = save(tmp_path / "a.vkv", caches(100), "tc:bits=2", force=True)
    assert forced.accounting.bits > 2  # what came out, beside what was asked
    assert {s.params["bits"] for _, s in coded(forced)} == {2.0}
    by_step = save(tmp_path / "b.vkv", caches(100), "tc:step=0.3")
    assert {s.params["bits"] for _, s in coded(by_step)} == {0.0}


def test_a_short_turn_behind_a_long_prompt_is_not_refused(tmp_path):
    save(tmp_path / "a.vkv", caches(2000), "tc:bits=2")
    cache = vkv.load(tmp_path / "a.vkv").cache
    for i, c in enumerate(cache):
        grow(c, i + 9, 70)
    info = save(tmp_path / "b.vkv", cache, "tc:bits=2")
    assert [s.tokens for _, s in coded(info)].count(70) == 6
