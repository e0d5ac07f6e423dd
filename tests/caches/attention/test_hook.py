"""Models of mlx-lm attend to codes where they leave attention to mlx-lm, and only there."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models import base

import vkv
from fixtures.models import tiny
from vkv.caches.attention import hook
from vkv.caches.attention.attend import Layer
from vkv.errors import CacheError

CODECS = ["affine:bits=4,group=32", "nsnquant:bits=2", "nsnquant:bits=1,pre_rope=false"]
IDS = [(37 * i + 11) % tiny.VOCAB for i in range(200)]


def filled(model, codec: str, tokens: int = 150):
    cache = vkv.make_prompt_cache(model, codec)
    mx.eval(model(mx.array([IDS[:tokens]]), cache=cache))
    return cache


def decoding(cache):
    """Return a copy whose rows are always decoded."""
    twins = copy.deepcopy(cache)
    for twin in twins:
        twin.attention = None
    return twins


@pytest.fixture
def attended(monkeypatch):
    """Count the calls that attend to codes."""
    calls, plain = [], Layer.attend

    def counted(self, queries, *args):
        calls.append(queries.shape[2])
        return plain(self, queries, *args)

    monkeypatch.setattr(Layer, "attend", counted)
    return calls


def test_mlx_lm_has_the_function_that_is_replaced():
    """If this fails, mlx-lm has changed: see ``vkv.caches.attention.hook``."""
    hook.install()
    hook.check(base.scaled_dot_product_attention.plain)
    assert base.scaled_dot_product_attention.plain.__module__ == "mlx_lm.models.base"


def test_most_models_of_mlx_lm_come_this_way():
    """If this fails, mlx-lm's models have found another way to attention."""
    hook.install()
    names = [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)]
    for name in ("llama", "qwen3", "gemma3_text", "mistral3", "phi3"):
        assert name in names
        module = importlib.import_module(f"mlx_lm.models.{name}")
        held = getattr(module, "scaled_dot_product_attention", None)
        assert held in (None, base.scaled_dot_product_attention)


def test_a_function_with_other_arguments_is_refused():
    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, window):
        raise AssertionError

    with pytest.raises(CacheError, match=r"takes .*window.*this release of mlx-lm is not known"):
        hook.check(scaled_dot_product_attention)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_a_step_on_codes_is_a_step_on_decoded_rows(codec, length, attended):
    model = tiny.llama(head_dim=64)
    cache = filled(model, codec)
    twins = decoding(cache)
    for i in range(150, 150 + 3 * length, length):
        step = mx.array([IDS[i : i + length]])
        found, want = model(step, cache=cache), model(step, cache=twins)
        assert mx.abs(found - want).max() < 2e-3 * mx.abs(want).max()
    assert attended == [length] * 6, "three steps of two layers, the first one, too"
    assert cache[0].attention_note is None


def test_prompts_are_decoded(attended):
    filled(tiny.llama(head_dim=64), CODECS[0])
    assert attended == []


class Other:
    """A model's attention that does something of its own."""

    def __init__(self, way):
        self.way = way

    def __call__(self, cache, x):
        keys, values = cache.update_and_fetch(x, x)
        return self.way(x, keys, values, cache)


def plain(queries, keys, values, cache):
    return base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, None)


def sinks(queries, keys, values, cache):
    none = mx.zeros(queries.shape[1])
    return base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, None, none)


def changed(queries, keys, values, cache):
    return plain(queries, keys * 2, values, cache)


def itself(queries, keys, values, cache):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1)


def masked(queries, keys, values, cache):
    mask = mx.arange(keys.shape[2] if isinstance(keys, mx.array) else 131) > 3
    return base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, mask)


@pytest.mark.parametrize(
    ("way", "note"),
    [
        (sinks, "the model uses attention sinks"),
        (changed, "the model changes them on their way"),
        (itself, "the model attends by itself"),
    ],
)
def test_others_get_arrays_and_a_note_says_so(way, note, attended):
    (cache,) = vkv.make_prompt_cache(tiny.llama(layers=1, head_dim=64), CODECS[0])
    rows = mx.random.normal((1, 2, 130, 64))
    cache.update_and_fetch(rows, rows)
    model = Other(way)
    for _ in range(3):
        twin = copy.deepcopy(cache)
        twin.attention = None
        x = mx.random.normal((1, 2, 1, 64))
        assert mx.array_equal(model(cache, x), model(twin, x))
    assert attended == []
    assert note in cache.attention_note


def test_a_mask_of_numbers_is_respected(attended):
    """After steps without one, so that the model was given rows that stand for arrays."""
    (cache,) = vkv.make_prompt_cache(tiny.llama(layers=1, head_dim=64), CODECS[0])
    rows, x = mx.random.normal((1, 2, 130, 64)), mx.random.normal((1, 2, 1, 64))
    cache.update_and_fetch(rows, rows)
    cache.settle()
    model = Other(plain)
    model(cache, x)
    cache.trim(1)
    twin = copy.deepcopy(cache)
    twin.attention, model.way = None, masked
    assert mx.array_equal(model(cache, x), model(twin, x))
    assert attended == [1]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_go_on_alone(through, attended):
    model = tiny.llama(head_dim=64)
    cache = filled(model, CODECS[0])
    step = mx.array([[5]])
    mx.eval(model(step, cache=cache))
    twins = through(cache)
    assert mx.array_equal(model(step, cache=cache), model(step, cache=twins))
    for twin in twins:
        twin.trim(20)
    assert [c.offset for c in (*cache, *twins)] == [152, 152, 132, 132]
    mx.eval(model(step, cache=twins), model(step, cache=cache))
    assert attended == [1] * 10


def test_threads_have_their_own_caches():
    model = tiny.llama(head_dim=64)
    mx.eval(model.parameters())

    def answer(codec: str) -> list[int]:
        cache, out = filled(model, codec), [5]
        for _ in range(20):
            out.append(int(mx.argmax(model(mx.array([out[-1:]]), cache=cache)[0, -1])))
        return out

    want = [answer(codec) for codec in CODECS]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answer, CODECS)) == want


@pytest.mark.parametrize("codec", CODECS)
def test_drafts_that_are_dropped_leave_no_trace(codec):
    model = tiny.llama(head_dim=64)
    plain, drafted = filled(model, codec), filled(model, codec)
    for i in range(150, 190, 4):
        now = IDS[i : i + 4]
        want = model(mx.array([now]), cache=plain)
        found = model(mx.array([now + now]), cache=drafted)[:, :4]
        assert mx.abs(found - want).max() < 2e-3 * mx.abs(want).max()
        for layer in drafted:
            layer.trim(4)
    assert [c.offset for c in plain] == [c.offset for c in drafted] == [190, 190]
