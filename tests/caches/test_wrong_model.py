"""A file of another model is refused, and the message names the difference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

import vkv
from fixtures.models import tiny
from tests.helpers.hostile import opened
from vkv.errors import CacheError, DigestError, MismatchError, VkvError

TOKENS = [(3 * i * i + i) % tiny.VOCAB for i in range(20)]
LINEAR = {"type": "linear", "factor": 2.0}


def filled(model: Module) -> list:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS]), cache=cache))
    return cache


def write(path, model, **options) -> None:
    vkv.save(path, filled(model), tokens=TOKENS, model=model, **options)


def adapted(model: Module) -> Module:
    tiny.with_lora(model)
    return model


def swapped(model: Module) -> Module:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    return model


def nudged(model: Module) -> Module:
    """One layer's weights, by a little."""
    weight = model.model.layers[1].self_attn.k_proj.weight
    model.model.layers[1].self_attn.k_proj.weight = weight * 1.01
    return model


WRONG = {
    "other weights": (tiny.llama, lambda: tiny.llama(seed=1), "weights"),
    "one layer's weights": (tiny.llama, lambda: nudged(tiny.llama()), "layer 1"),
    "rope base": (tiny.llama, lambda: tiny.llama(rope_theta=5e5), "500000"),
    "rope factor": (
        lambda: tiny.llama(rope_scaling=LINEAR),
        lambda: tiny.llama(rope_scaling=LINEAR | {"factor": 4.0}),
        "factor",
    ),
    "fewer layers": (
        tiny.llama,
        lambda: tiny.llama(layers=1),
        "2 layers in the file, 1 in the model",
    ),
    "more layers": (
        tiny.llama,
        lambda: tiny.llama(layers=3),
        "2 layers in the file, 3 in the model",
    ),
    "swapped layers": (tiny.llama, lambda: swapped(tiny.llama()), "swapped"),
    "other KV head count": (tiny.llama, lambda: tiny.llama(kv_heads=1), "num_key_value_heads"),
    "adapter loaded": (tiny.llama, lambda: adapted(tiny.llama()), "adapter"),
    "adapter missing": (lambda: adapted(tiny.llama()), tiny.llama, "adapter"),
    "other dtype": (tiny.llama, lambda: tiny.llama(dtype=mx.float16), "weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_by_name(name, tmp_path):
    mine, other, word = WRONG[name]
    write(tmp_path / "a.vkv", mine())
    assert vkv.load(tmp_path / "a.vkv", model=mine()).tokens == TOKENS
    with pytest.raises(MismatchError) as exc:
        vkv.load(tmp_path / "a.vkv", model=other())
    assert word in str(exc.value)
    assert exc.value.rule == "I1"
    assert len(exc.value.differences) >= 1


def test_force_loads_and_warns(tmp_path):
    write(tmp_path / "a.vkv", tiny.llama())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        prompt = vkv.load(tmp_path / "a.vkv", model=tiny.llama(seed=1), force=True)
    assert prompt.tokens == TOKENS
    assert any("weights" in str(w.message) for w in seen)


def test_without_identity_the_number_of_layers_still_counts(tmp_path):
    vkv.save(tmp_path / "a.vkv", filled(tiny.llama()), tokens=TOKENS)
    with pytest.raises(MismatchError, match="2 caches in the file, the model takes 3"):
        vkv.load(tmp_path / "a.vkv", model=tiny.llama(layers=3))


def test_an_offset_off_by_one_is_refused_at_save(tmp_path):
    cache = filled(tiny.llama())
    cache[1].offset -= 1
    with pytest.raises(CacheError, match=r"layers\[1\]: holds 19 tokens, but .* 20 token ids"):
        vkv.save(tmp_path / "a.vkv", cache, tokens=TOKENS)
    assert list(tmp_path.iterdir()) == []


def test_one_kv_head_for_two_is_refused(tmp_path):
    """mlx broadcasts such a cache over the heads without an error."""
    model = tiny.llama()
    cache = filled(model)
    for layer in cache:
        layer.keys, layer.values = layer.keys[:, :1], layer.values[:, :1]
    with pytest.raises(VkvError, match="1 KV head"):
        vkv.save(tmp_path / "a.vkv", cache, tokens=TOKENS, model=model)


def test_a_flipped_bit_is_refused_and_held_caches_stay(tmp_path):
    path = tmp_path / "a.vkv"
    write(path, tiny.llama())
    held = vkv.load(path).cache
    before = [mx.array(c.keys) for c in held]
    mx.eval(before)
    raw = bytearray(path.read_bytes())
    raw[-7] ^= 16
    path.write_bytes(raw)
    with pytest.raises(DigestError, match=r"the bytes changed \[D1\]"):
        vkv.load(path)
    assert all(mx.array_equal(a, c.keys) for a, c in zip(before, held, strict=True))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_architecture_goes_on_as_if_never_saved(name, tmp_path):
    model = tiny.MODELS[name]()
    cache = filled(model)
    vkv.save(tmp_path / "a.vkv", cache, tokens=TOKENS, model=model)
    loaded = vkv.load(tmp_path / "a.vkv", model=model).cache
    for token in (7, 1, 8):
        step = mx.array([[token]])
        assert mx.array_equal(model(step, cache=cache), model(step, cache=loaded))


def test_any_call_of_mlx_lm_works_on_a_loaded_cache(tmp_path):
    import copy

    write(tmp_path / "a.vkv", tiny.llama(head_dim=64), codec="affine:bits=4")
    for cache in vkv.load(tmp_path / "a.vkv").cache:
        assert type(cache) is KVCache
        assert not hasattr(cache, "bits")
        mx.eval(cache.state)
        assert cache.nbytes > 0
        assert cache.is_trimmable()
        assert copy.deepcopy(cache).trim(3) == 3
        cache.make_mask(2, window_size=None, return_array=False)


def forged(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A file of the tiny llama, its identity left out and its layers changed."""
    model = tiny.llama()
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    vkv.save(path, cache, tokens=[1, 2, 3])
    draft = opened(path.read_bytes())
    edit(draft.header)
    draft.data = {name: draft.data[name] for name in draft.header["tensors"]}
    path.write_bytes(draft.build())
    return path


def halved(header: dict[str, Any]) -> None:
    """Half the width, and so twice the rows of tensors that are as long."""
    for layer in header["layers"]:
        layer["scalars"]["offset"] *= 2
        for tensor in layer["tensors"].values():
            batch, heads, rows, dim = tensor["shape"]
            tensor["shape"] = [batch, heads, rows * 2, dim // 2]
            tensor["segments"][0]["tokens"] *= 2
            part = tensor["segments"][0]["parts"]["data"]
            header["tensors"][part]["shape"] = tensor["shape"]
    del header["tokens"], header["tensors"]["vkv.tokens"]


def emptied(header: dict[str, Any]) -> None:
    for layer in header["layers"]:
        for tensor in layer.pop("tensors").values():
            del header["tensors"][tensor["segments"][0]["parts"]["data"]]
        layer["scalars"]["offset"] = 0


def chunked(header: dict[str, Any]) -> None:
    for layer in header["layers"]:
        layer["kind"] = "chunked"
        layer["scalars"] |= {"chunk_size": 8, "start": 0}


def listed(header: dict[str, Any]) -> None:
    header["layers"] = [{"kind": "list", "children": [layer]} for layer in header["layers"]]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (halved, "2 KV heads of 16 and 16 channels in the file, 2 KV heads of 32 and 32 channels"),
        (emptied, "nothing in the file, something in the model"),
        (chunked, "kind chunked in the file, kv in the model"),
        (listed, "kind list in the file, kv in the model"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_caches_that_no_model_makes_are_refused_without_an_identity(edit, expected, tmp_path):
    path = forged(tmp_path / "a.vkv", edit)
    vkv.load(path)  # nobody says what it is for
    with pytest.raises(MismatchError) as caught:
        vkv.load(path, model=tiny.llama())
    assert str(caught.value).startswith(f"layer 0 and 1 more: {expected}")


def test_bounded_and_quantized_caches_take_the_place_of_a_models_own(tmp_path):
    model = tiny.llama(head_dim=64)
    for cache in (make_prompt_cache(model, 16), [KVCache().to_quantized() for _ in range(2)]):
        model(mx.array([[1, 2, 3]]), cache=cache)
        vkv.save(tmp_path / "a.vkv", cache, tokens=[1, 2, 3])
        assert len(vkv.load(tmp_path / "a.vkv", model=model).cache) == 2
