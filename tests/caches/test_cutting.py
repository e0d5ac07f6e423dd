"""Go on from a cache that was cut: right logits, or a refusal; codes in front are kept."""

from __future__ import annotations

import copy
from importlib.metadata import version

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.caches.packed.cache import PackedKVCache
from vkv.errors import CacheError, MismatchError

LOSSY = ["nsnquant:bits=2", "kvquant:bits=3", "affine:bits=4", "tc:bits=3"]


def ids_of(count, seed=11):
    return [(37 * i + seed) % tiny.VOCAB for i in range(count)]


def filled(model, ids, *, step=None):
    cache, logits = make_prompt_cache(model), None
    for at in range(0, len(ids), step or len(ids)):
        logits = model(mx.array([ids[at : at + (step or len(ids))]]), cache=cache)[0, -1]
        mx.eval(logits, [c.state for c in cache])
    return cache, logits


def first_keys(cache):
    """The first 192 keys of the first layer; a packed cache decodes them."""
    first = cache[0]
    keys = first.rows_keys.decode() if isinstance(first, PackedKVCache) else first.keys
    return keys[..., :192, :]


@pytest.mark.skipif(
    version("mlx-lm").startswith("0.31."), reason="0.31 trims chunks below 256 tokens wrongly"
)
@pytest.mark.parametrize("kept", range(30, 60))
def test_a_chunked_cache_goes_on_right_or_not_at_all(kept, tmp_path):
    model, ids = tiny.llama4(chunk=16), ids_of(60)
    cache, _ = filled(model, ids, step=1)
    vkv.save(tmp_path / "c.vkv", cache, tokens=ids, model=model)
    prompt = vkv.load(tmp_path / "c.vkv", model=model)
    new = [*ids[:kept], 5, 6, 7]
    if kept < 48:  # the front of its last whole chunk is gone
        with pytest.raises(CacheError, match="can be cut to 48 tokens or more"):
            prompt.resume(new)
        assert prompt.tokens == ids
        return
    rest = prompt.resume(new)
    assert len(new) - len(rest) >= kept
    logits = model(mx.array([rest]), cache=prompt.cache)[0, -1]
    _, want = filled(model, new, step=1)
    assert mx.allclose(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("live", ["dense", "packed"])
@pytest.mark.parametrize("codec", LOSSY)
def test_error_does_not_grow_over_edits(codec, live, tmp_path):
    """An answer is asked for again and again; what is in front of the edits stays as it was."""
    model, ids = tiny.llama(head_dim=64), ids_of(320)
    cache, _ = filled(model, ids)
    exact = first_keys(cache)
    path, errors = tmp_path / "n.vkv", []
    vkv.save(path, cache, tokens=ids, model=model, codec=codec)
    for turn in range(4):
        prompt = vkv.load(path, model=model, live=live)
        kept = first_keys(prompt.cache)
        errors.append((mx.linalg.norm(kept - exact) / mx.linalg.norm(exact)).item())
        ids = ids[: 300 - 10 * turn] + [(7 * i + turn) % tiny.VOCAB for i in range(40)]
        rest = prompt.resume(ids)
        mx.eval(model(mx.array([rest]), cache=prompt.cache))
        vkv.save(path, prompt.cache, tokens=ids, model=model, codec=codec)
    # a product of matrices may round otherwise where it has other rows
    assert errors == pytest.approx([errors[0]] * len(errors), rel=1e-4)
    coded = [s.tokens for s in vkv.inspect(path).header.layers[0].tensors["keys"].segments
             if s.codec != "raw"]  # fmt: skip
    assert sum(coded) >= 256


def test_the_store_keeps_codes_in_front_of_an_edit(tmp_path):
    model, ids = tiny.llama(head_dim=64), ids_of(320)
    cache, _ = filled(model, ids)
    exact = first_keys(cache)
    store, errors = vkv.PromptStore(tmp_path), []
    store.put(cache, ids, model=model, codec="nsnquant:bits=2")
    for turn in range(4):
        ids = ids[: 300 - 10 * turn] + [(7 * i + turn) % tiny.VOCAB for i in range(40)]
        hit = store.get(ids, model=model)
        assert hit.tokens == 300 - 10 * turn
        kept = first_keys(hit.cache)
        errors.append((mx.linalg.norm(kept - exact) / mx.linalg.norm(exact)).item())
        mx.eval(model(mx.array([hit.rest]), cache=hit.cache))
        store.put(hit.cache, ids, model=model, codec="nsnquant:bits=2")
    # a product of matrices may round otherwise where it has other rows
    assert errors == pytest.approx([errors[0]] * len(errors), rel=1e-4)


@pytest.mark.parametrize("live", ["dense", "packed"])
def test_layers_of_an_interrupted_step_are_refused(live, tmp_path):
    model = tiny.llama(head_dim=64)
    cache, _ = filled(model, ids_of(50))
    cache[0].update_and_fetch(cache[0].keys[..., :1, :], cache[0].values[..., :1, :])
    for options in ({}, {"model": model}):
        with pytest.raises(CacheError, match=r"50 tokens, but layers\[0\] holds 51") as caught:
            vkv.save(tmp_path / "a.vkv", cache, **options)
        assert caught.value.rule == "L6"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [60, 25, 1])
def test_rings_are_stored_without_what_no_later_token_sees(step, tmp_path):
    model, ids = tiny.gemma3_text(), ids_of(60)
    cache, _ = filled(model, ids, step=step)
    info = vkv.save(tmp_path / "a.vkv", cache, tokens=ids, model=model)
    rings = [layer for layer in info.header.layers if layer.kind == "rotating"]
    assert {layer.tensors["keys"].shape[-2] for layer in rings} == {16}
    loaded = vkv.load(tmp_path / "a.vkv", model=model).cache
    for more in ([3], [4, 5, 6, 7, 8], [9]):
        want = model(mx.array([more]), cache=cache)
        assert mx.array_equal(model(mx.array([more]), cache=loaded), want)


@pytest.mark.parametrize("codec", ["raw", "affine:bits=4,group=32"])
def test_rings_that_have_not_wrapped_grow_as_deltas(codec, tmp_path):
    model, ids = tiny.gemma3_text(window=256), ids_of(120)
    cache, _ = filled(model, ids[:80])
    vkv.save(tmp_path / "a.vkv", cache, tokens=ids[:80], model=model, codec=codec)
    cache = vkv.load(tmp_path / "a.vkv", model=model).cache
    mx.eval(model(mx.array([ids[80:]]), cache=cache))
    whole = vkv.save(tmp_path / "whole.vkv", cache, tokens=ids, model=model, codec=codec)
    info = vkv.save(
        tmp_path / "b.vkv", cache, tokens=ids, model=model, codec=codec, parent=tmp_path / "a.vkv"
    )
    external = {name for name, stored in info.header.tensors.items() if stored.file}
    for i, layer in enumerate(info.header.layers):
        assert f"layers.{i}.keys.0.{'data' if codec == 'raw' else 'codes'}" in external, layer.kind
    assert info.accounting.roles["payload"] < 0.4 * whole.accounting.roles["payload"]
    same = 120 if codec == "raw" else 80
    for a, b in zip(vkv.load(tmp_path / "b.vkv", model=model).cache, cache, strict=True):
        assert mx.array_equal(a.keys[..., :same, :], b.keys[..., :same, :])


def test_shifted_positions_are_refused(tmp_path):
    model, ids = tiny.llama(head_dim=64), ids_of(20)
    cache, _ = filled(model, ids)
    model.model._rope_deltas = mx.array([[0]])  # as after a prompt of text alone
    vkv.save(tmp_path / "a.vkv", cache, tokens=ids, model=model)
    assert vkv.load(tmp_path / "a.vkv", model=model).tokens == ids
    model.model._rope_deltas = mx.array([[-7]])
    with pytest.raises(CacheError, match=r"model\.model\._rope_deltas is \[-7\]") as caught:
        vkv.save(tmp_path / "b.vkv", cache, tokens=ids, model=model)
    assert caught.value.rule == "L11"
    with pytest.raises(MismatchError, match="left by a prompt with an image"):
        vkv.load(tmp_path / "a.vkv", model=model)


def test_a_copy_is_cut_and_the_original_stays():
    model, ids = tiny.gemma3_text(window=256), ids_of(40)
    cache, _ = filled(model, ids)
    prompt = vkv.Prompt(copy.deepcopy(cache), ids)
    prompt.resume([*ids[:10], 1])
    assert {c.offset for c in prompt.cache} == {10}
    assert {c.offset for c in cache} == {40}
