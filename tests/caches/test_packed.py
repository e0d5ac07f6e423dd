"""Packed caches: what they hold is what the codec makes of the tokens, however they came."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

import vkv
from fixtures.models import tiny
from tests.helpers.hostile import opened
from vkv.caches.packed import batch
from vkv.caches.packed.cache import PackedKVCache
from vkv.caches.packed.encoder import FIT
from vkv.caches.packed.make import make_prompt_cache
from vkv.errors import CacheError

GOOD = Path(__file__).parents[2] / "fixtures" / "v1" / "good"
CODECS = ["affine:bits=4,group=32", "raw", "nsnquant:bits=2", "nsnquant:bits=1,window=32"]
#: Its tables are fitted to the first tokens; later ones go on with them.
FROZEN = "kvquant:bits=2"
TOKENS = 150


def rows(seed: int, tokens: int = TOKENS, dim: int = 64) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, 2, tokens, dim), key=mx.random.key(seed))
    return keys.astype(mx.float16), values.astype(mx.float16)


def fresh(codec: str, **options) -> PackedKVCache:
    return make_prompt_cache(tiny.llama(layers=1, head_dim=64), codec, **options)[0]


def fed(codec: str, splits: list[int], **options) -> PackedKVCache:
    cache, start = fresh(codec, **options), 0
    keys, values = rows(0)
    for n in splits:
        cut = slice(start, start + n)
        cache.update_and_fetch(keys[..., cut, :], values[..., cut, :])
        start += n
    cache.settle()
    return cache


def held(cache: PackedKVCache) -> list[mx.array]:
    """Every array that the settled cache holds, in a fixed order."""
    cache.settle()
    return [*cache.rows_keys.arrays, *cache.rows_values.arrays]


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return len(a) == len(b) and all(mx.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "splits",
    [[1] * TOKENS, [64, 64, 22], [63, 1, 1, 85], [100, *[1] * 50]],
    ids=["token by token", "windows", "odd", "prefill and decode"],
)
def test_state_does_not_depend_on_the_split(codec, splits):
    assert same(held(fed(codec, [TOKENS])), held(fed(codec, splits)))


@pytest.mark.parametrize(
    "codec",
    [FROZEN, f"{FROZEN},refit_interval=300", "kvquant:bits=3,table=token,pre_rope=false"],
)
@pytest.mark.parametrize("splits", [[400] * 2, [100] * 8, [1] * 300 + [500], [257, 1, 500, 42]])
def test_tables_do_not_depend_on_the_split(codec, splits):
    """They are fitted to the first tokens, however many came with them."""
    whole, parts, start = fresh(codec), fresh(codec), 0
    keys, values = rows(0, 800)
    whole.update_and_fetch(keys, values)
    for n in splits:
        parts.update_and_fetch(*(x[..., start : start + n, :] for x in (keys, values)))
        start += n
    assert same(held(whole), held(parts))
    assert whole.rows_keys.encoded >= 1 + 2 * FIT


@pytest.mark.parametrize("codec", CODECS)
def test_nbytes_is_what_is_held(codec):
    cache = fed(codec, [TOKENS])
    assert cache.nbytes == sum(x.nbytes for x in held(cache))


def test_it_holds_less_than_the_dense_cache():
    dense = KVCache()
    dense.update_and_fetch(*rows(0))
    assert fed(CODECS[0], [128]).nbytes < 0.35 * 2 * 128 / TOKENS * rows(0)[0].nbytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("keep", [0, 1, 63, 64, 65, 149, 150])
def test_trim(codec, keep):
    cache = fed(codec, [TOKENS])
    before = [x[..., :keep, :] for x in cache.keys_and_values()]
    assert cache.trim(TOKENS - keep) == TOKENS - keep
    assert cache.offset == keep
    assert same(list(cache.keys_and_values()), before)
    after = cache.update_and_fetch(*rows(1, 3))
    assert [x.shape[-2] for x in after] == [keep + 3] * 2
    # A window cut through became exact values, and may since have been encoded again.
    whole = keep - keep % 64 if "nsnquant" in codec else keep
    assert same([x[..., :whole, :] for x in after], [x[..., :whole, :] for x in before])


def test_residual_tokens_stay_exact():
    cache = fed("affine:bits=2,group=32", [TOKENS], residual=40)
    keys, _ = rows(0)
    assert cache.rows_keys.tail.shape[-2] == TOKENS - 64  # the next 64 would leave too few
    assert mx.array_equal(cache.keys_and_values()[0][..., -40:, :], keys[..., -40:, :])


def test_too_many_tokens_are_refused():
    cache = fresh("raw", max_tokens=8)
    cache.update_and_fetch(*rows(0, 8))
    with pytest.raises(CacheError, match="9 tokens, the limit is 8"):
        cache.update_and_fetch(*rows(1, 1))
    assert cache.offset == 8


def test_a_refused_head_dim_is_held_raw_and_said_so():
    cache = fresh("affine:bits=4,group=64")
    keys, values = rows(0, dim=80)
    fetched = cache.update_and_fetch(keys, values)
    assert same(list(fetched), [keys, values])
    assert "head dim 80 is not a multiple of group 64" in cache.note


def test_other_caches_of_a_hybrid_model_stay():
    model = tiny.gemma3_text()
    with pytest.warns(UserWarning, match="layers 0-1 of 3: RotatingKVCache is not packed"):
        kinds = [type(c) for c in make_prompt_cache(model, CODECS[0])]
    assert kinds == [RotatingKVCache, RotatingKVCache, PackedKVCache]


@pytest.mark.parametrize("codec", CODECS)
def test_saved_and_loaded_it_goes_on_as_if_never_saved(codec, tmp_path):
    model = tiny.llama(head_dim=64)
    tokens = [(5 * i * i + i) % tiny.VOCAB for i in range(100)]
    cache = vkv.make_prompt_cache(model, codec)
    model(mx.array([tokens]), cache=cache)
    vkv.save(tmp_path / "a.vkv", cache, tokens=tokens, model=model)
    loaded = vkv.load(tmp_path / "a.vkv", model=model, live="packed").cache
    assert all(same(held(a), held(b)) for a, b in zip(cache, loaded, strict=True) if codec != "raw")
    for token in (3, 1, 4, 1, 5):
        step = mx.array([[token]])
        assert mx.array_equal(model(step, cache=cache), model(step, cache=loaded))


def test_a_packed_cache_is_saved_as_it_is(tmp_path):
    cache = fed("affine:bits=4,group=32", [TOKENS], residual=10)
    info = vkv.save(tmp_path / "a.vkv", [cache])
    (row,) = info.to_dict()["layers"]
    assert row["tensors"]["keys"].endswith("affine:bits=4,group=32,scale=F16 128 + raw 22")
    assert info.accounting.roles["residual"] == 2 * 2 * 22 * 64 * 2
    dense = vkv.load(tmp_path / "a.vkv").cache[0]
    assert same([dense.keys, dense.values], list(cache.keys_and_values()))


def test_the_protocol_of_mlx_lm(tmp_path):
    cache = fed(CODECS[0], [TOKENS])
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "to_quantized")
    assert cache.is_trimmable()
    assert not cache.empty()
    assert cache.size() == TOKENS
    assert cache.make_mask(1, window_size=None, return_array=False) is None
    mx.eval(cache.state)
    twin = copy.deepcopy(cache)
    twin.trim(10)
    assert (cache.offset, twin.offset) == (TOKENS, TOKENS - 10)
    assert type(cache.merge([cache, twin])).__name__ == "BatchKVCache"
    dense = batch.dense(cache)
    assert same([dense.keys, dense.values], list(cache.keys_and_values()))


def test_live_is_checked(tmp_path):
    with pytest.raises(CacheError, match="live='lazy', expected one of"):
        vkv.load(tmp_path / "a.vkv", live="lazy")


def test_kvquant_freezes_its_tables_at_prefill(tmp_path):
    cache = fresh(FROZEN)
    keys, values = rows(0, 500)
    cache.update_and_fetch(keys[..., :300, :], values[..., :300, :])
    cache.settle()
    (sink, first) = cache.rows_keys.runs
    assert (sink.codec.id, sink.tokens) == ("raw", 1)
    assert mx.array_equal(cache.keys_and_values()[0][..., :1, :], keys[..., :1, :])
    before = cache.keys_and_values()[0][..., : 1 + FIT, :]
    for i in range(300, 500):
        cache.update_and_fetch(keys[..., i : i + 1, :], values[..., i : i + 1, :])
    cache.settle()
    after = cache.rows_keys.runs[1]
    assert mx.array_equal(after.parts["levels"], first.parts["levels"])
    assert mx.array_equal(after.parts["bounds"], first.parts["bounds"])
    assert mx.array_equal(cache.keys_and_values()[0][..., : 1 + FIT, :], before)
    assert cache.nbytes == sum(x.nbytes for x in held(cache))


def test_kvquant_refits_after_its_interval():
    cache = fresh(f"{FROZEN},refit_interval=128")
    keys, values = rows(0, 700)
    for i in range(0, 700, 50):
        cache.update_and_fetch(keys[..., i : i + 50, :], values[..., i : i + 50, :])
    tables = [k.parts["levels"] for k in cache.rows_keys.runs if k.codec.id == "kvquant"]
    assert len(tables) > 1
    assert not mx.array_equal(tables[0], tables[1])


def test_kvquant_is_exact_until_there_is_enough_to_fit():
    cache = fresh(FROZEN)
    keys, values = rows(0, FIT)
    assert same(list(cache.update_and_fetch(keys, values)), [keys, values])


def test_kvquant_saved_and_loaded_goes_on_as_if_never_saved(tmp_path):
    model = tiny.llama(head_dim=64)
    tokens = [(5 * i * i + i) % tiny.VOCAB for i in range(300)]
    cache = vkv.make_prompt_cache(model, FROZEN)
    model(mx.array([tokens]), cache=cache)
    vkv.save(tmp_path / "a.vkv", cache, tokens=tokens, model=model)
    loaded = vkv.load(tmp_path / "a.vkv", model=model, live="packed").cache
    for token in range(80):
        step = mx.array([[token]])
        assert mx.array_equal(model(step, cache=cache), model(step, cache=loaded))
    assert all(same(held(a), held(b)) for a, b in zip(cache, loaded, strict=True))


def test_kvquant_grown_keeps_its_tables_in_the_file(tmp_path):
    model = tiny.llama(head_dim=64)
    tokens = [(5 * i * i + i) % tiny.VOCAB for i in range(240)]
    cache = _dense(model, tokens[:200])
    vkv.save(tmp_path / "a.vkv", cache, tokens=tokens[:200], model=model, codec=FROZEN)
    live = vkv.load(tmp_path / "a.vkv", model=model).cache
    model(mx.array([tokens[200:]]), cache=live)
    info = vkv.save(tmp_path / "b.vkv", live, tokens=tokens, model=model, codec=FROZEN)
    segments = info.header.layers[0].tensors["keys"].segments
    assert [s.codec for s in segments] == ["raw", "kvquant", "kvquant"]
    assert segments[1].parts["levels"] == segments[2].parts["levels"]


def _dense(model, tokens):
    from mlx_lm.models.cache import make_prompt_cache as dense

    cache = dense(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return cache


CHILD = """
import sys
import mlx.core as mx
import vkv
from fixtures.models import tiny

model = tiny.llama(head_dim=64)
cache = vkv.load(sys.argv[1], model=model, live="packed").cache
print([mx.argmax(model(mx.array([[t]]), cache=cache)[0, -1]).item() for t in range(70)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["nsnquant:bits=2", FROZEN])
def test_a_new_process_goes_on_as_the_cache_that_was_never_saved(codec, tmp_path):
    model = tiny.llama(head_dim=64)
    tokens = [(5 * i * i + i) % tiny.VOCAB for i in range(300)]
    cache = vkv.make_prompt_cache(model, codec)
    mx.eval(model(mx.array([tokens]), cache=cache))
    vkv.save(tmp_path / "a.vkv", cache, tokens=tokens, model=model)
    here = [mx.argmax(model(mx.array([[t]]), cache=cache)[0, -1]).item() for t in range(70)]
    there = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "a.vkv")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(here)


def test_one_segment_without_tokens_covers_all_rows(tmp_path):
    """H7 allows it; its codes are as many as the rows are."""
    draft = opened((GOOD / "affine-4bit-group64-f16.vkv").read_bytes())
    for layer in draft.header["layers"]:
        for tensor in layer["tensors"].values():
            del tensor["segments"][0]["tokens"]
    (tmp_path / "a.vkv").write_bytes(draft.build())
    dense, packed = (
        vkv.load(tmp_path / "a.vkv", live=live).cache[0] for live in ("dense", "packed")
    )
    assert packed.offset == dense.offset > 0
    assert mx.array_equal(packed.keys_and_values()[0], dense.keys)


def test_a_codec_made_for_files_is_said_to_be_worse_here(tmp_path):
    model = tiny.MODELS["llama"]()
    with pytest.warns(UserWarning, match=r"codec tc finds its steps .* a file is written"):
        make_prompt_cache(model, codec="tc")
    cache = [KVCache() for _ in model.layers]
    mx.eval(model(mx.array([[*range(1, 101)]]), cache=cache))
    vkv.save(tmp_path / "a.vkv", cache, codec="tc:step=0.5")
    assert any("codec tc " in note for note in vkv.load(tmp_path / "a.vkv", live="packed").notes)
    assert not vkv.load(tmp_path / "a.vkv").notes
