"""A prompt holds a conversation: what its cache holds is known after every turn."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv.caches import chat
from vkv.errors import CacheError

IDS = [(37 * i + 11) % tiny.VOCAB for i in range(80)]
MORE = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model():
    return tiny.llama(head_dim=64)


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=cache))
    path = tmp_path_factory.mktemp("prompt") / "a.vkv"
    vkv.save(path, cache, tokens=IDS, model=model)
    return path


def fresh_logits(model, ids):
    return model(mx.array([ids]), cache=make_prompt_cache(model))[:, -1]


def computed(model, prompt, rest):
    return model(mx.array([rest]), cache=prompt.cache)[:, -1]


def close(a, b) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-3, atol=1e-4))


def check(model, prompt, ids):
    """Fit ``prompt`` to ``ids``; it answers as a cache made from scratch does."""
    rest = prompt.resume(ids)
    assert prompt.tokens + rest == ids
    assert prompt.length == len(prompt.tokens)
    assert close(computed(model, prompt, rest), fresh_logits(model, ids))
    assert prompt.tokens == ids
    assert [c.offset for c in prompt.cache] == [len(ids)] * len(prompt.cache)
    return len(rest)


@pytest.mark.parametrize("live", ["dense", "packed"])
def test_resume_any_number_of_times_in_any_order(model, path, live):
    prompt = vkv.load(path, model=model, live=live)
    assert check(model, prompt, IDS + MORE) == 5
    assert check(model, prompt, IDS + MORE) == 1
    assert check(model, prompt, [*IDS, *MORE, 9, 2]) == 2
    assert check(model, prompt, IDS[:30]) == 1
    assert check(model, prompt, [*IDS[:20], 7]) == 1
    assert check(model, prompt, IDS) == 60


def test_generated_tokens_are_told_or_dropped(model, path):
    prompt = vkv.load(path, model=model)
    rest = prompt.resume(IDS + MORE)
    answer = [
        r.token
        for r in stream_generate(
            model, tiny.tokenizer(), rest, prompt_cache=prompt.cache, max_tokens=6
        )
    ]
    assert prompt.length == len(IDS + MORE) + len(answer)
    assert prompt.tokens == IDS + MORE, "what was generated is not recorded yet"
    prompt.extend(answer)
    assert prompt.tokens == IDS + MORE + answer
    assert check(model, prompt, [*IDS, *MORE, *answer, 8]) == 1

    forgetful = vkv.load(path, model=model)
    mx.eval(computed(model, forgetful, forgetful.resume(IDS + MORE)))
    mx.eval(computed(model, forgetful, [6, 6, 6]))
    assert check(model, forgetful, [*IDS, *MORE, 8]) == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "the cache holds 88 tokens, 87 would be recorded"),
        ([1, 2, 3, 4], "the cache holds 88 tokens, 89 would be recorded"),
    ],
)
def test_extend_compares_with_the_cache(model, path, ids, message):
    prompt = vkv.load(path, model=model)
    mx.eval(computed(model, prompt, prompt.resume(IDS + MORE)))
    mx.eval(computed(model, prompt, [1, 2, 3]))
    with pytest.raises(CacheError, match=message) as caught:
        prompt.extend(ids)
    assert caught.value.rule == "L8"
    assert prompt.tokens == IDS + MORE
    prompt.extend([1, 2, 3])
    assert prompt.tokens == [*IDS, *MORE, 1, 2, 3]


def test_what_was_given_out_and_never_computed_is_not_in_it(model, path):
    prompt = vkv.load(path, model=model)
    assert prompt.resume(IDS + MORE) == MORE
    assert prompt.tokens == IDS
    assert check(model, prompt, [*IDS, 9]) == 1


def test_an_unrelated_prompt_leaves_the_cache_as_it_is(model, path):
    prompt = vkv.load(path, model=model)
    other = [IDS[0] + 1, 5]
    with pytest.raises(CacheError, match="shares 0 leading tokens with the 80 in the cache"):
        prompt.resume(other)
    with pytest.raises(CacheError, match=r"shares 3 leading tokens .* expected 10 or more"):
        prompt.resume([*IDS[:3], 0, 0], at_least=10)
    assert prompt.tokens == IDS
    assert prompt.resume(other, at_least=0) == other
    assert (prompt.length, prompt.tokens) == (0, [])
    assert close(computed(model, prompt, other), fresh_logits(model, other))


def test_an_interrupted_step_is_cut_off(model, path):
    """Some layers are a token longer then; the next ``resume`` makes them equal."""
    prompt = vkv.load(path, model=model)
    row = mx.ones((1, prompt.cache[0].keys.shape[1], 1, 64))
    prompt.cache[0].update_and_fetch(row, row)
    assert prompt.length == len(IDS)
    assert check(model, prompt, IDS + MORE) == 5


def test_a_fresh_cache_starts_a_conversation(model):
    prompt = vkv.Prompt(vkv.make_prompt_cache(model, "affine:bits=8,group=32"), [])
    assert check(model, prompt, IDS) == len(IDS)
    assert repr(prompt) == f"<Prompt: 80 token ids of 80 tokens in {len(prompt.cache)} caches>"
    with pytest.raises(CacheError, match="not loaded from a file"):
        _ = prompt.info


def test_repr(model, path):
    prompt = vkv.load(path, model=model)
    mx.eval(computed(model, prompt, [1, 2]))
    caches = len(prompt.cache)
    assert repr(prompt) == (
        f"<Prompt: 80 token ids of 82 tokens in {caches} caches, from {str(path)!r}>"
    )


def recurrent():
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, 2))
    return cache


def test_a_cache_that_counts_nothing_is_told():
    prompt = vkv.Prompt([recurrent()], [1, 2])
    assert prompt.length is None
    assert prompt.resume([1, 2, 3]) == [3]
    assert prompt.tokens == [1, 2]
    with pytest.raises(CacheError, match="does not count its tokens, and 1 ids were to be"):
        prompt.resume([1, 2, 3, 4])
    prompt.extend([7])
    assert prompt.tokens == [1, 2, 3, 7]
    assert prompt.resume([1, 2, 3, 7, 8]) == [8]


def test_caches_that_a_model_never_uses_do_not_count():
    """Empty in the file, they stay so."""
    used, unused = KVCache(), KVCache()
    used.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    prompt = vkv.Prompt([used, unused], [1, 2, 3])
    assert prompt.length == 3
    assert prompt.resume([1, 2, 9]) == [9]
    used.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
    prompt.extend([])
    assert prompt.tokens == [1, 2, 9]


def test_what_cannot_be_cut_names_what_is_not_recorded():
    counting = KVCache()
    counting.update_and_fetch(mx.ones((1, 1, 5, 4)), mx.ones((1, 1, 5, 4)))
    prompt = vkv.Prompt([counting, recurrent()], [1, 2, 3])
    with pytest.raises(CacheError, match="2 tokens in it are not recorded, see extend"):
        prompt.resume([1, 2, 3, 4])


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("live", ["dense", "packed"])
def test_a_chat_runs_through_the_template(model, live, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = chat.opening(tokenizer, [{"role": "system", "content": "You know lamps."}])
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    vkv.save(tmp_path / "a.vkv", cache, tokens=ids, model=model)
    prompt = vkv.load(tmp_path / "a.vkv", model=model, live=live)
    said = []
    for question in ("Is it lit?", "Why?"):
        responses = list(prompt.chat(model, tokenizer, question, max_tokens=4))
        said.append([r.token for r in responses])
        assert prompt.tokens[-4:] == said[-1]
        assert prompt.length == len(prompt.tokens)
    text = tokenizer.decode(prompt.tokens)
    assert text.startswith("<|im_start|>system\nYou know lamps.<|im_end|>\n<|im_start|>user\nIs it")
    first = tokenizer.decode(said[0])
    assert f"assistant\n{first}<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n" in text
    info = vkv.save(tmp_path / "b.vkv", prompt.cache, tokens=prompt.tokens, model=model)
    assert info.tokens == len(prompt.tokens)


def test_a_chat_that_is_left_early_knows_what_it_holds(model):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt = vkv.Prompt(make_prompt_cache(model), [])
    for n, _ in enumerate(prompt.chat(model, tokenizer, "Why?", max_tokens=50)):
        if n == 3:
            break
    question = chat.encode(tokenizer, "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.tokens[: len(question)] == question
    assert prompt.length == len(prompt.tokens) == len(question) + 4
    assert len(list(prompt.chat(model, tokenizer, "And?", max_tokens=2))) == 2


def test_a_turn_wants_to_know_what_was_generated(model, path):
    prompt = vkv.load(path, model=model)
    mx.eval(computed(model, prompt, [1, 2]))
    with pytest.raises(CacheError, match="the cache holds 82 tokens, 80 are recorded"):
        prompt.turn(tiny.tokenizer(), "Why?")
