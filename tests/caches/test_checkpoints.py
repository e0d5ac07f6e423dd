"""Caches that cannot be cut go back to a checkpoint, and say the same as a fresh prefill."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.caches.checkpoints.cap import cache_bytes, within
from vkv.caches.checkpoints.record import Checkpoint, checkpoints_of
from vkv.errors import CacheError, VkvError

IDS = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(120)]
STEP = 16
#: Models with a cache that lets go of tokens.
FORGETFUL = ["gemma3_text", "llama4", "lfm2", "qwen3_next", "falcon_h1", "mamba2"]

LETS_GO = version("mlx-lm") >= "0.32"

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
    exact = name == "llama4" and not LETS_GO  # mlx-lm 0.31 keeps the front of its chunks
    reused = min(shared, len(ids) - 1) if exact else reused
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
    assert all(c.message for c in found)
    assert len(ids) - found[-1].tokens < 32, "an answer computed again needs no other"
    other = [*messages[:1], {"role": "user", "content": "Something else?"}]
    asked = tokenizer.apply_chat_template(other, add_generation_prompt=True)
    system = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=False)
    assert len(asked) - len(now.resume(asked)) >= len(system) * 0.95


def parts(name: str = "gemma3_text") -> list[Checkpoint]:
    """Return checkpoints of equal size: two at ends of messages, two others between."""
    now = prompt(tiny.MODELS[name](), (30, 50, 70, 90))
    marks = zip((True, False, True, False), checkpoints_of(now.cache), strict=False)
    return [replace(c, message=message) for message, c in marks]


@pytest.mark.parametrize(
    ("share", "kept"),
    [(None, [30, 50, 70, 90]), (4, [30, 50, 70, 90]), (3.5, [30, 70, 90]), (2.2, [30, 70]),
     (0.1, [30, 70]), (0, [])],
)  # fmt: skip
def test_what_a_share_keeps(share, kept):
    """The oldest go first, ends of messages last; the first and the newest end always stay."""
    found = parts()
    assert [c.tokens for c in within(found, share, found[0].nbytes)] == kept


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf"), "a", True, [1]])
def test_what_is_no_share(share):
    with pytest.raises(VkvError, match="for checkpoints, expected a number from 0 on"):
        vkv.prefill(tiny.MODELS["lfm2"](), IDS, checkpoints=[30], checkpoint_share=share)


def test_a_share_given_to_prefill_save_and_store(tmp_path):
    model = tiny.MODELS["gemma3_text"]()
    assert [c.tokens for c in checkpoints_of(prompt(model, 30).cache)] == [90, 119], "by default"
    now = vkv.prefill(model, IDS, checkpoints=30, checkpoint_share=9.0)
    assert [c.tokens for c in checkpoints_of(now.cache)] == [30, 60, 90, 119]
    info = vkv.save(tmp_path / "a.vkv", now, model=model, checkpoint_share=0.1)
    assert [c["tokens"] for c in info.checkpoints] == [90, 119]
    sizes = [c["bytes"] for c in info.checkpoints]
    assert sum(sizes) == info.accounting.groups["checkpoints"].bytes
    store = vkv.PromptStore(tmp_path / "store")
    entry = store.put(now.cache, IDS, model=model, checkpoint_share=0)
    assert vkv.inspect(entry.path).checkpoints == []


@every_model
def test_the_bytes_of_a_cache_are_those_in_its_file(name, tmp_path):
    model = tiny.MODELS[name]()
    now = prompt(model, None)
    info = vkv.save(tmp_path / "a.vkv", now, model=model)
    stored = sum(group.bytes for group in info.accounting.groups.values())
    assert cache_bytes(now.cache) == stored - info.accounting.roles["tokens"] or (
        cache_bytes(now.cache) == stored
    )


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


@every_model
@pytest.mark.parametrize(("at", "expected"), [(30, 30), (89, 60), (119, 119), (500, 120)])
def test_loaded_at_the_nearest_point(name, at, expected, tmp_path):
    model = tiny.MODELS[name]()
    vkv.save(tmp_path / "a.vkv", prompt(model), model=model)
    loaded = vkv.load(tmp_path / "a.vkv", model=model, at=at)
    if name == "llama4" and not LETS_GO:  # nothing has left its chunks: it can be cut anywhere
        expected = min(at, 120)
    assert loaded.tokens == IDS[:expected]
    assert loaded.length in (None, expected)
    assert bool(loaded.notes) == (at != expected)
    got = last_logits(model, [1, 2], loaded.cache)
    assert mx.allclose(got, fresh_logits(model, [*IDS[:expected], 1, 2], [1, 2]), atol=2e-6)


def test_a_cache_that_can_be_cut_is_loaded_at_any_number(tmp_path):
    model = tiny.llama()
    vkv.save(tmp_path / "a.vkv", prompt(model), model=model)
    assert vkv.load(tmp_path / "a.vkv", model=model, at=77).tokens == IDS[:77]


@pytest.mark.parametrize(
    ("at", "message"),
    [(29, "no point at or before 29 tokens to go back to; checkpoints: 30, 60, 90, 119; the end"),
     (0, "0 tokens to go back to"), (-1, "-1 tokens"), (True, "True tokens"), (1.5, "1.5 tokens")],
)  # fmt: skip
def test_no_such_point(at, message, tmp_path):
    model = tiny.MODELS["lfm2"]()
    vkv.save(tmp_path / "a.vkv", prompt(model), model=model)
    with pytest.raises(VkvError, match=message):
        vkv.load(tmp_path / "a.vkv", model=model, at=at)


def broken_step(model: Any, rest: list[int], cache: list[Any], layer: int = 1) -> None:
    """Compute a step that ends before a layer, as Ctrl-C does."""
    whole = list(model.model.layers)

    class Broken:
        def __getattr__(self, name):
            return getattr(whole[layer], name)

        def __call__(self, *args, **kwargs):
            raise KeyboardInterrupt

    model.model.layers = [*whole[:layer], Broken(), *whole[layer + 1 :]]
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([rest]), cache=cache)
    model.model.layers = whole


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("checkpoints", [None, (30, 60)])
def test_a_later_step_that_was_interrupted_is_noticed(name, checkpoints, tmp_path):
    """Every layer took part in the first step of the rest, some in the second."""
    model = tiny.MODELS[name]()
    now = prompt(model, checkpoints)
    ids = [*IDS, *range(1, 33)]
    rest = now.resume(ids)
    run(model, rest[:16], now.cache)
    broken_step(model, rest[16:], now.cache)
    for use in (
        lambda: now.extend([]),
        lambda: vkv.save(tmp_path / "a.vkv", now, model=model),
        lambda: now.turn(tiny.tokenizer(), "And?"),
    ):
        with pytest.raises(CacheError, match=r"interrupted|were to be computed|would be recorded"):
            use()
    if checkpoints is None:
        with pytest.raises(CacheError, match=r"vkv\.prefill\(model, tokens, checkpoints=…\)"):
            now.resume(ids)
        return
    rest = now.resume(ids)
    assert len(rest) == len(ids) - 119
    want = fresh_logits(model, ids, rest)
    assert mx.allclose(last_logits(model, rest, now.cache), want, atol=2e-6)


def test_a_ring_after_an_interrupted_step_says_the_way_out():
    model = tiny.MODELS["gemma3_text"]()
    now = prompt(model, None)
    rest = now.resume([*IDS, *range(1, 33)])
    run(model, rest[:16], now.cache)
    broken_step(model, rest[16:], now.cache)
    with pytest.raises(CacheError, match=r"or compute it with vkv\.prefill\(model, tokens, check"):
        now.resume([*IDS, *range(1, 33)])


def test_inline_keeps_them(tmp_path):
    model = tiny.MODELS["lfm2"]()
    first = prompt(model)
    vkv.save(tmp_path / "a.vkv", first, model=model)
    vkv.save(tmp_path / "b.vkv", first, model=model, parent=tmp_path / "a.vkv")
    vkv.convert(tmp_path / "b.vkv", tmp_path / "c.vkv", inline=True)
    loaded = vkv.load(tmp_path / "c.vkv", model=model)
    assert loaded.resume([*IDS[:60], 1]) == [1]


def run(model: Any, rest: list[int], cache: list[Any]) -> None:
    mx.eval(model(mx.array([rest]), cache=cache))


@every_model
def test_a_plain_continuation_computes_only_what_is_new(name):
    model = tiny.MODELS[name]()
    now = prompt(model)
    for turn in range(3):
        rest = now.resume([*now.tokens, *range(turn + 1, turn + 6)])
        assert len(rest) == 5
        run(model, rest, now.cache)
        now.extend([])


@every_model
def test_a_prompt_that_went_back_can_be_saved(name, tmp_path):
    model = tiny.MODELS[name]()
    now = prompt(model)
    rest = now.resume([*IDS[:60], 1, 2])
    vkv.save(tmp_path / "at.vkv", vkv.Prompt(now.cache, IDS[:60]), model=model)
    run(model, rest, now.cache)
    now.extend([])
    vkv.save(tmp_path / "a.vkv", now, model=model)
    assert [c.tokens for c in vkv.inspect(tmp_path / "a.vkv").header.checkpoints] == [30, 60]


@every_model
def test_caches_go_back_in_place(name):
    """Whoever holds the caches that were given sees them go back."""
    model = tiny.MODELS[name]()
    own = make_prompt_cache(model)
    now = vkv.prefill(model, IDS, checkpoints=(30, 60), step=STEP, cache=own)
    ids = [*IDS[:60], 1]
    rest = now.resume(ids)
    assert mx.allclose(last_logits(model, rest, own), fresh_logits(model, ids, rest), atol=2e-6)


def test_a_checkpoint_of_other_ids_is_not_used(tmp_path):
    """The cache was cut by mlx-lm and grew otherwise."""
    model = tiny.MODELS["gemma3_text"]()
    now = vkv.prefill(model, IDS[:15], checkpoints=[5, 10])
    assert trim_prompt_cache(now.cache, 9) == 9
    new = [*IDS[:6], *[2, 3] * 20]
    run(model, new[6:], now.cache)
    other = vkv.Prompt(now.cache, new)
    vkv.save(tmp_path / "a.vkv", other, model=model)
    assert [c.tokens for c in vkv.inspect(tmp_path / "a.vkv").header.checkpoints] == [5]
    rest = other.resume([*new[:12], 77])
    assert other.tokens == new[:5]
    assert mx.allclose(
        last_logits(model, rest, other.cache),
        fresh_logits(model, [*new[:12], 77], rest),
        atol=2e-6,
    )


@pytest.mark.parametrize("codec", ["affine:bits=2,group=32", "nsnquant:bits=2,window=16"])
def test_saved_again_checkpoints_keep_their_codes(codec, tmp_path):
    model = tiny.MODELS["gemma3_text"]()
    vkv.save(tmp_path / "0.vkv", prompt(model), model=model, codec=codec)
    for i in (1, 2):
        again = vkv.load(tmp_path / f"{i - 1}.vkv", model=model)
        vkv.save(tmp_path / f"{i}.vkv", again, model=model, codec=codec)
        assert (tmp_path / f"{i}.vkv").read_bytes() == (tmp_path / "0.vkv").read_bytes()


def test_diff_sees_them(tmp_path):
    model = tiny.MODELS["lfm2"]()
    for name, places in (("a", (30, 60)), ("b", (30, 90))):
        vkv.save(tmp_path / f"{name}.vkv", prompt(model, places), model=model)
    found = vkv.diff(tmp_path / "a.vkv", tmp_path / "b.vkv", deep=True)
    assert any(d.at.startswith("checkpoints[1]") for d in found.differences)
    assert not any(d.at.startswith("checkpoints[0]") for d in found.differences)


def test_caches_with_checkpoints_can_be_pickled():
    model = tiny.MODELS["qwen3_next"]()
    now = prompt(model)
    other = vkv.Prompt(pickle.loads(pickle.dumps(now.cache)), IDS)
    ids = [*IDS[:60], 1]
    assert other.resume(ids) == now.resume(ids) == [1]
    assert mx.array_equal(last_logits(model, [1], other.cache), last_logits(model, [1], now.cache))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": [1, 2, 100_000]}, "token id 100000, the model has"),
        ({"step": 0}, "step is 0, expected a whole number above 0"),
        ({"step": 2.5}, "step is 2.5"),
        ({"checkpoints": 1}, "119 checkpoints, a file holds 64"),
        ({"checkpoints": mx.array([3])}, "checkpoints="),
        ({"cache": []}, "0 caches, the model takes"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(VkvError, match=message):
        vkv.prefill(tiny.MODELS["mamba2"](), **{"tokens": IDS, **options})


def test_a_recurrent_cache_that_is_filled_is_no_empty_one():
    model = tiny.MODELS["mamba2"]()
    cache = make_prompt_cache(model)
    run(model, IDS[:15], cache)
    with pytest.raises(CacheError, match="holds tokens already"):
        vkv.prefill(model, IDS[:3], cache=cache)


def test_a_chat_that_fails_records_nothing_it_did_not_compute(tmp_path):
    model, tokenizer = tiny.MODELS["mamba2"](), tiny.tokenizer()
    now = vkv.Prompt(make_prompt_cache(model), [])
    list(now.chat(model, tokenizer, "Hi", max_tokens=3))
    with pytest.raises(TypeError):
        list(now.chat(model, tokenizer, "X", bogus=1))
    for use in (
        lambda: now.resume([1, 2]), lambda: vkv.save(tmp_path / "a.vkv", now, model=model)
    ):  # fmt: skip
        with pytest.raises(CacheError, match="does not count its tokens"):
            use()
