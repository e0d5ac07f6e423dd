"""A file's token ids and the turn that goes on from them encode the whole conversation."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fixtures.models import tiny
from vkv.caches import chat
from vkv.caches.prompt import Prompt
from vkv.errors import CacheError, VkvError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Name -> (template, what ends an answer).
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHATML,
        "<|im_end|>",
    ),
    "thinking": (
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
        "<|im_end|>",
    ),
    "llama": (
        "<s>{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}",
        "<eot>",
    ),
    "mistral": (
        "<s>{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
        "{% elif m.role == 'user' %}[INST] {{ ns.system + m.content }} [/INST]"
        "{% set ns.system = '' %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
    ),
    "gemma": (
        "<bos>{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% else %}"
        "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ ns.system + m.content | trim }}<end>\n{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        "<end>",
    ),
}
SYSTEM = {"role": "system", "content": "You know lamps."}
USER = {"role": "user", "content": "Is it lit?"}
ANSWER = {"role": "assistant", "content": "At night."}


def user(text):
    return {"role": "user", "content": text}


def prompt(tokens, cache=None):
    if cache is None:
        cache = KVCache()
        rows = mx.zeros((1, 1, len(tokens), 4))
        cache.update_and_fetch(rows, rows)
    return Prompt([cache], list(tokens), info=None)


@pytest.fixture(params=TEMPLATES)
def template(request):
    """A tokenizer with the template, and the text that ends an answer."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, end = TEMPLATES[request.param]
    return tokenizer, end


def rendered(tokenizer, messages, answering=True):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)


def check(tokenizer, held, text, whole):
    loaded = prompt(held)
    rest = loaded.turn(tokenizer, text)
    assert tokenizer.decode(loaded.tokens + rest) == whole
    assert loaded.tokens == list(held), "one token a byte: nothing joins, so nothing is trimmed"


@pytest.mark.parametrize(
    ("messages", "whole"),
    [
        ([SYSTEM], [SYSTEM, user("Why?")]),
        ([SYSTEM, user("Why")], [SYSTEM, user("WhyWhy?")]),
        ([user("Why")], [user("WhyWhy?")]),
        ([USER, ANSWER], [USER, ANSWER, user("Why?")]),
        ([SYSTEM, USER, ANSWER], [SYSTEM, USER, ANSWER, user("Why?")]),
    ],
    ids=["system", "system and user", "user", "answered", "answered with system"],
)
def test_a_saved_conversation_goes_on(template, messages, whole):
    tokenizer, _ = template
    check(tokenizer, chat.opening(tokenizer, messages), "Why?", rendered(tokenizer, whole))


@pytest.mark.parametrize("complete", [True, False], ids=["ended", "cut short"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER]])
def test_a_generated_answer_goes_on(template, messages, complete):
    tokenizer, end = template
    asked = rendered(tokenizer, messages)
    held = chat.encode(tokenizer, asked + "At night." + end * complete)
    tail = rendered(tokenizer, [USER, ANSWER, user("Why?")])
    after = tail[tail.index("At night." + end) :]
    check(tokenizer, held, "Why?", asked + after)


def test_the_open_message_is_that_of_mlx_lm_cache_prompt():
    tokenizer = tiny.tokenizer()
    expected = tokenizer.apply_chat_template(
        [USER], add_generation_prompt=False, continue_final_message=True
    )
    assert chat.opening(tokenizer, [USER]) == expected


@pytest.fixture(scope="module")
def joining():
    """A tokenizer in which ``wo`` and ``wor`` are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*alphabet, "wo", "wor"])}
    base = Tokenizer(models.BPE(vocab=vocab, merges=[("w", "o"), ("wo", "r")]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=base, clean_up_tokenization_spaces=False)


def test_words_that_join_are_encoded_as_one(joining):
    loaded = prompt(joining.encode("the wo"))
    rest = loaded.turn(joining, "rld", plain=True)
    assert loaded.tokens + rest == joining.encode("the world")
    assert joining.decode(rest) == "world"
    assert loaded.cache[0].offset == len(loaded.tokens)


def test_a_cache_that_cannot_be_trimmed_keeps_its_ids(joining):
    held, state = joining.encode("the wo"), ArraysCache(1)
    loaded = prompt(held, state)
    assert loaded.turn(joining, "rld", plain=True) == joining.encode("rld")
    assert loaded.tokens == held


def test_ids_that_are_no_canonical_encoding_are_kept(joining):
    held = [joining.encode(c)[0] for c in "wor" * 5]  # a model may generate them so
    loaded = prompt(held)
    assert loaded.turn(joining, "!", plain=True) == joining.encode("!")
    assert loaded.tokens == held


def refused_by_the_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content and raise_exception('no roles here') }}"
    chat.opening(tokenizer, [USER])


def without_a_template():
    tokenizer = tiny.tokenizer()
    tokenizer.has_chat_template = False
    chat.opening(tokenizer, [USER])


def dropped_by_the_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "hello"
    prompt([1, 2]).turn(tokenizer, "Why?")


def without_tokens():
    Prompt([KVCache()], None).turn(tiny.tokenizer(), "Why?")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            refused_by_the_template,
            VkvError,
            "the chat template refuses the messages: no roles here",
        ),
        (without_a_template, VkvError, "the tokenizer has no chat template"),
        (dropped_by_the_template, VkvError, "the chat template drops the message"),
        (
            without_tokens,
            CacheError,
            "the file holds no token ids, so no prompt can go on from it; "
            "`vkv convert --model … --prompt …` adds them [L8]",
        ),
    ],
)
def test_messages(act, error, message):
    with pytest.raises(error) as found:
        act()
    assert str(found.value) == message


def test_a_batch_is_no_chat(joining):
    cache = KVCache()
    rows = mx.zeros((5, 1, 2, 4))
    cache.update_and_fetch(rows, rows)
    for held in (cache, CacheList(cache)):
        with pytest.raises(CacheError, match=r"5 sequences, a chat goes on from one \[L8\]"):
            prompt([1, 2], held).turn(joining, "x", plain=True)
