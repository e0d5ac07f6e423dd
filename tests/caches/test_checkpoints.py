"""Caches that cannot be cut go back to a checkpoint, and say the same as a fresh prefill."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.caches.checkpoints.record import checkpoints_of
from vkv.errors import CacheError, VkvError

IDS = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(120)]
STEP = 16
#: Models with a cache that lets go of tokens.
FORGETFUL = ["gemma3_text", "llama4", "lfm2", "qwen3_next", "falcon_h1", "mamba2"]

every_model = pytest.mark.parametrize("name", FORGETFUL)


def prompt(model: Any, checkpoints: Any = (30, 60, 90), ids: list[int] = IDS) -> vkv.Prompt:
    return vkv.prefill(model, ids, checkpoints=checkpoints, step=STEP)


def last_logits(model: Any, rest: list[int], cache: list[Any]) -> mx.array:
    return model(mx.array([rest]), cache=cache)[:, -1]


def fresh_logits(model: Any, ids: list[int], rest: list[int]) -> mx.array:
    """Return the logits of a fresh prefill whose last call has ``rest``."""
    cache = make_prompt_cache(model)
    known = ids[: len(ids) - len(rest)]
    for start in range(0, len(known), STEP):
        mx.eval(model(mx.array([known[start : start + STEP]]), cache=cache))
    return last_logits(model, rest, cache)


@every_model
@pytest.mark.parametrize(("shared", "reused"), [(120, 119), (100, 90), (60, 60), (45, 30)])
def test_back_to_the_nearest_checkpoint(name, shared, reused):
    model = tiny.MODELS[name]()
    now = prompt(model)
    ids = [*IDS[:shared], 5, 6, 7][: 119 if shared == 120 else None] + [8] * (shared == 120)
    rest = now.resume(ids)
    assert len(ids) - len(rest) == reused
    assert now.tokens == ids[:reused]
    got = last_logits(model, rest, now.cache)
    assert mx.allclose(got, fresh_logits(model, ids, rest), atol=2e-6)
    assert {c.tokens for c in checkpoints_of(now.cache)} <= set(range(reused + 1))


@every_model
def test_a_deep_copy_goes_back_on_its_own(name):
    model = tiny.MODELS[name]()
    now = prompt(model)
    other = vkv.Prompt(copy.deepcopy(now.cache), IDS)
    rest = other.resume([*IDS[:60], 1, 2])
    got = last_logits(model, rest, other.cache)
    again = now.resume([*IDS[:60], 1, 2])  # the first is as it was
    assert again == rest
    assert mx.array_equal(got, last_logits(model, again, now.cache))


@every_model
def test_going_back_twice_gives_the_same(name):
    model = tiny.MODELS[name]()
    now, found = prompt(model), []
    for _ in range(2):
        rest = now.resume([*IDS[:60], 1, 2])
        found.append(last_logits(model, rest, now.cache))
        now.extend([])
    assert mx.allclose(*found, atol=2e-6)  # kernels may differ by the shape of what came before


def test_caches_that_can_be_cut_take_none():
    now = prompt(tiny.llama())
    assert checkpoints_of(now.cache) == ()
    assert now.resume([*IDS[:45], 1]) == [1]


def test_a_checkpoint_holds_what_can_still_be_seen_and_no_more():
    """A ring of 16: its rows before are neither held nor kept alive."""
    model = tiny.MODELS["gemma3_text"]()
    (window,) = {c.max_size for c in prompt(model).cache if hasattr(c, "max_size")}
    for checkpoint in checkpoints_of(prompt(model).cache):
        for taken in checkpoint.layers.values():
            assert {v.shape[-2] for v in taken.values.values()} == {min(window, checkpoint.tokens)}


def test_before_the_first_checkpoint_the_cache_is_left_as_it_is():
    model = tiny.MODELS["lfm2"]()
    now = prompt(model)
    with pytest.raises(CacheError, match="cannot drop the last 110 tokens"):
        now.resume([*IDS[:10], 1])
    assert now.tokens == IDS
    assert len(checkpoints_of(now.cache)) == 4


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [(None, []), (50, [50, 100, 119]), ([60, 30, 60, 120], [30, 60, 119]), ([], [119])],
)
def test_where_they_are_taken(checkpoints, expected):
    now = prompt(tiny.MODELS["lfm2"](), checkpoints)
    assert [c.tokens for c in checkpoints_of(now.cache)] == expected


@pytest.mark.parametrize("checkpoints", ["chapters", 0, -5, [0], [121], ["a"], 2.5, True])
def test_other_places_are_refused(checkpoints):
    with pytest.raises(VkvError, match="checkpoint"):
        prompt(tiny.MODELS["lfm2"](), checkpoints)


def test_at_the_ends_of_messages():
    model, tokenizer = tiny.MODELS["lfm2"](), tiny.tokenizer()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "Of what?"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    now = vkv.prefill(model, ids, checkpoints="messages", messages=messages, tokenizer=tokenizer)
    found = checkpoints_of(now.cache)
    assert [c.message for c in found] == [True] * (len(found) - 1) + [False]
    other = [*messages[:1], {"role": "user", "content": "Something else?"}]
    asked = tokenizer.apply_chat_template(other, add_generation_prompt=True)
    system = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=False)
    assert len(asked) - len(now.resume(asked)) >= len(system) * 0.95


def test_filled_caches_and_empty_prompts_are_refused():
    model = tiny.MODELS["lfm2"]()
    with pytest.raises(CacheError, match="holds tokens already"):
        vkv.prefill(model, IDS, cache=prompt(model).cache)
    with pytest.raises(CacheError, match="nothing to compute"):
        vkv.prefill(model, [])


CODECS = ["raw", "affine:bits=8,group=32", "nsnquant:bits=2", "kvquant:bits=4", "tc:bits=6"]


@every_model
@pytest.mark.parametrize("live", ["dense", "packed"])
def test_through_a_file_they_are_what_they_were(name, live, tmp_path):
    model = tiny.MODELS[name]()
    now, path = prompt(model), tmp_path / "a.vkv"
    info = vkv.save(path, now, model=model)
    assert info.accounting.adds_up
    assert vkv.validate(path, deep=True, model=model).ok
    loaded = vkv.load(path, model=model, live=live)
    ids = [*IDS[:60], 1, 2]
    for cache in (loaded.cache, copy.deepcopy(loaded.cache)):
        other = vkv.Prompt(cache, IDS)
        rest = other.resume(ids)
        assert rest == [1, 2]
        got = last_logits(model, rest, other.cache)
        assert mx.array_equal(got, last_logits(model, now.resume(ids), now.cache))
        now = prompt(model)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec, tmp_path):
    model = tiny.gemma3(head_dim=64) if hasattr(tiny, "gemma3") else tiny.MODELS["gemma3_text"]()
    now = prompt(model)
    vkv.save(tmp_path / "a.vkv", now, model=model, codec=codec)
    vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", codec=codec, model=model)
    for path in (tmp_path / "a.vkv", tmp_path / "b.vkv"):
        loaded = vkv.load(path, model=model)
        assert [c.tokens for c in checkpoints_of(loaded.cache)] == [30, 60, 90, 119]
        rest = loaded.resume([*IDS[:60], 1, 2])
        assert mx.isfinite(last_logits(model, rest, loaded.cache)).all()


def test_they_can_be_left_out(tmp_path):
    model = tiny.MODELS["lfm2"]()
    info = vkv.save(tmp_path / "a.vkv", prompt(model), model=model, checkpoints=False)
    assert info.header.checkpoints == ()
    assert "checkpoints" not in info.header.needs


def test_inline_keeps_them(tmp_path):
    model = tiny.MODELS["lfm2"]()
    first = prompt(model)
    vkv.save(tmp_path / "a.vkv", first, model=model)
    vkv.save(tmp_path / "b.vkv", first, model=model, parent=tmp_path / "a.vkv")
    vkv.convert(tmp_path / "b.vkv", tmp_path / "c.vkv", inline=True)
    loaded = vkv.load(tmp_path / "c.vkv", model=model)
    assert loaded.resume([*IDS[:60], 1]) == [1]
