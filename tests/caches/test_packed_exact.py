"""Packed caches attend to the present call exactly, and are settled for whoever looks."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm import batch_generate
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.caches.packed.cache import PackedKVCache
from vkv.caches.packed.encoder import FIT

CODECS = ["affine:bits=4,group=32", "nsnquant:bits=2", "kvquant:bits=2"]
SPLITS = [[300], [128, 128, 44], [1] * 70 + [230], [100, 1, 199]]


def rows(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, 2, tokens, 64), key=mx.random.key(seed))
    return keys.astype(mx.float16), values.astype(mx.float16)


def fresh(codec: str) -> PackedKVCache:
    return vkv.make_prompt_cache(tiny.llama(layers=1, head_dim=64), codec)[0]


def same(a, b) -> bool:
    return len(a) == len(b) and all(mx.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("splits", SPLITS, ids=["whole", "even", "single", "odd"])
@pytest.mark.parametrize("codec", CODECS)
def test_tokens_of_a_call_are_exact_and_earlier_ones_as_settled(codec, splits):
    cache, start = fresh(codec), 0
    both = rows(300)
    for n in splits:
        settled = copy.deepcopy(cache)
        now = [x[..., start : start + n, :] for x in both]
        fetched = cache.update_and_fetch(*now)
        assert same([x[..., start:, :] for x in fetched], now)
        if start:
            assert same([x[..., :start, :] for x in fetched], settled.keys_and_values())
        assert same(cache.keys_and_values(), fetched), "a layer that shares them, in this call"
        start += n
    cache.settle()
    assert not same([cache.keys_and_values()[0]], [both[0]])


def snapshot(cache: PackedKVCache) -> None:
    cache.snapshot()


LOOKS = {
    "settle": PackedKVCache.settle,
    "state": lambda cache: cache.state,
    "nbytes": lambda cache: cache.nbytes,
    "snapshot": snapshot,
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("codec", CODECS)
def test_who_looks_sees_the_settled_cache(codec, look):
    cache = fresh(codec)
    cache.update_and_fetch(*rows(400))
    LOOKS[look](cache)
    assert cache.rows_keys.encoded >= 384
    assert cache.nbytes < 0.5 * sum(x.nbytes for x in rows(400))


@pytest.mark.parametrize(
    "through", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))]
)
@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_is_settled_and_goes_on_alone(codec, through):
    cache = fresh(codec)
    cache.update_and_fetch(*rows(400))
    twin = through(cache)
    cache.settle()
    want = cache.keys_and_values()
    assert same(twin.keys_and_values(), want)
    twin.trim(150)
    twin.update_and_fetch(*rows(80, seed=1))
    assert (cache.offset, twin.offset) == (400, 330)
    assert same(cache.keys_and_values(), want)


@pytest.mark.parametrize("codec", CODECS)
def test_tokens_dropped_after_their_call_leave_no_trace(codec):
    """As speculative decoding drops drafts: they cross a window, yet nothing is reopened."""
    plain, drafted = fresh(codec), fresh(codec)
    both = rows(300)
    for start in range(0, 300, 5):
        now = [x[..., start : start + 5, :] for x in both]
        plain.update_and_fetch(*now)
        drafted.update_and_fetch(*(mx.concatenate([x, x], axis=-2) for x in now))
        drafted.trim(5)
    assert same(plain.keys_and_values(), drafted.keys_and_values())
    assert plain.nbytes == drafted.nbytes


def test_values_that_the_codec_refuses_stay_exact():
    cache, (keys, values) = fresh("kvquant:bits=2"), rows(300)
    keys[..., 100:101, :] = float("inf")
    cache.update_and_fetch(keys, values)
    cache.settle()
    assert "keys" not in cache.note
    assert "held raw" in cache.note
    assert same([cache.keys_and_values()[0]], [keys])
    assert cache.rows_values.encoded == 1 + FIT
    cache.update_and_fetch(*rows(100, seed=1))
    assert (cache.offset, cache.rows_keys.encoded) == (400, 0)


def test_layers_are_decoded_one_after_the_other():
    """Else a step needs the memory of a dense cache."""
    model = tiny.llama(layers=16, head_dim=64)
    caches = vkv.make_prompt_cache(model, "affine:bits=4")
    keys, _ = mx.random.normal((2, 1, 2, 4096, 64))
    for cache in caches:
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.state)
    mx.eval(model(mx.array([[5]]), cache=caches))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(mx.array([[5]]), cache=caches))
    assert mx.get_peak_memory() - before < 0.35 * 16 * 2 * keys.nbytes


IDS = [(37 * i + 11) % tiny.VOCAB for i in range(100)]
MIXED = {
    "packed and packed": "pp",
    "packed and none": "p.",
    "packed and dense": "pd",
    "dense and packed": "dp",
    "none and packed": ".p",
}


@pytest.mark.parametrize("kinds", MIXED)
def test_a_batch_of_packed_and_other_caches(kinds):
    """A batch is dense from then on; each prompt's answer is the one it has alone."""
    model, tokenizer = tiny.llama(head_dim=64), tiny.tokenizer()

    def cache(kind):
        if kind == ".":
            return None
        made = make_prompt_cache(model)
        if kind == "p":
            made = vkv.make_prompt_cache(model, "affine:bits=8,group=32")
        mx.eval(model(mx.array([IDS]), cache=made))
        return made

    def answers(prompts, caches):
        return batch_generate(model, tokenizer, prompts, prompt_caches=caches, max_tokens=4).texts

    prompts = [[5, 6], [7, 8]]
    alone = [answers([p], [cache(k)]) for p, k in zip(prompts, MIXED[kinds], strict=True)]
    together = answers(prompts, [cache(kind) for kind in MIXED[kinds]])
    assert together == [text for (text,) in alone]


def test_mlx_lm_does_not_save_it(tmp_path):
    model = tiny.llama(head_dim=64)
    cache = vkv.make_prompt_cache(model, "affine:bits=4")
    mx.eval(model(mx.array([IDS]), cache=cache))
    with pytest.raises((ValueError, vkv.VkvError), match=r"save it with vkv\.save"):
        save_prompt_cache(str(tmp_path / "a.safetensors"), cache)
    assert not list(tmp_path.iterdir())


def test_keys_can_carry_what_is_to_be_computed_with_them():
    cache = fresh("affine:bits=4")
    cache.update_and_fetch(*rows(100))
    message = mx.array([1.0]) + 1
    before = cache.keys
    cache.keys = mx.depends(cache.keys, message)
    assert same([cache.keys], [before])
    with pytest.raises(vkv.VkvError, match=r"keys \(1, 2, 3, 64\) in place of 100 encoded tokens"):
        cache.keys = before[..., :3, :]


def in_a_thread(act):
    """Return what ``act`` returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("live", ["dense", "packed"])
def test_a_prompt_loaded_in_one_thread_answers_in_another(tmp_path, live, codec):
    model = tiny.llama(head_dim=64)
    mx.eval(model.parameters())
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=cache))
    vkv.save(tmp_path / "a.vkv", cache, tokens=IDS, model=model, codec=codec)
    here, there = (vkv.load(tmp_path / "a.vkv", model=model, live=live).cache for _ in "ab")
    want = model(mx.array([[5]]), cache=here)

    def step():
        logits = model(mx.array([[5]]), cache=there)
        mx.eval(logits)
        return logits

    assert same([in_a_thread(step)], [want])


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_a_cache_that_was_not_computed_is_refused_in_another_thread(tmp_path, codec):
    """The same rule for dense and packed: MLX computes an array where it was begun."""
    model = tiny.llama(head_dim=64)
    mx.eval(model.parameters())
    cache = vkv.make_prompt_cache(model, codec) if codec else make_prompt_cache(model)
    model(mx.array([IDS]), cache=cache)
    with pytest.raises(vkv.CacheError, match=r"in the thread that filled it \[L2\]") as caught:
        in_a_thread(lambda: vkv.save(tmp_path / "a.vkv", cache, tokens=IDS))
    assert caught.value.rule == "L2"
    assert not list(tmp_path.iterdir())
    mx.eval([layer.state for layer in cache])
    assert in_a_thread(lambda: vkv.save(tmp_path / "a.vkv", cache, tokens=IDS)).size
