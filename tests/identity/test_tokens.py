"""Token ids and tokenizers."""

from __future__ import annotations

import struct
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from blake3 import blake3
from tokenizers import AddedToken

from fixtures.models import tiny
from vkv import identity
from vkv.errors import VkvError

IDS = [0, 1, 255, 256, 65_535, 49_151]
TAKEN = {
    "list": IDS,
    "tuple": tuple(IDS),
    "batch of one": [IDS],
    "numpy int64": np.array(IDS),
    "numpy big-endian": np.array(IDS, ">i4"),
    "numpy uint16": np.array(IDS, np.uint16),
    "numpy strided": np.repeat(np.array(IDS), 2)[::2],
    "mlx int32": mx.array(IDS),
    "mlx uint16": mx.array(IDS, dtype=mx.uint16),
    "mlx int64, batch of one": mx.array([IDS], dtype=mx.int64),
}


@pytest.mark.parametrize("name", TAKEN)
def test_token_bytes_are_little_endian_u32(name: str) -> None:
    assert identity.token_bytes(TAKEN[name]) == struct.pack(f"<{len(IDS)}I", *IDS)
    assert identity.of_tokens(TAKEN[name]) == blake3(struct.pack(f"<{len(IDS)}I", *IDS)).digest()


@pytest.mark.parametrize("empty", [[], (), [[]], np.zeros(0, np.int32), mx.zeros((1, 0))])
def test_no_tokens_are_no_bytes(empty: Any) -> None:
    assert identity.token_bytes(empty) == b""


def test_the_largest_id_fits() -> None:
    assert identity.token_bytes([2**32 - 1]) == b"\xff" * 4


REFUSED = {
    "negative": ([3, -1], "token ids from -1 to 3, expected 0 to 4294967295"),
    "too large": ([2**32], "token ids from 4294967296 to 4294967296, expected 0 to"),
    "far too large": ([2**64], "token ids of type object, expected whole numbers"),
    "floats": ([1.0, 2.0], "token ids of type float64"),
    "mlx floats": (mx.array([1.0]), "token ids of type float32"),
    "mlx bfloat16": (mx.array([1.0], dtype=mx.bfloat16), "not token ids|of type"),
    "booleans": ([True], "token ids of type bool"),
    "text": ("abc", "text, expected token ids: call tokenizer.encode first"),
    "list of text": (["a"], "token ids of type <U1"),
    "a batch of two": ([[1, 2], [3, 4]], r"token ids of shape \(2, 2\), expected \(T,\)"),
    "ragged": ([[1, 2], [3]], "not token ids"),
    "one number": (7, r"token ids of shape \(\)"),
    "none": (None, r"token ids of shape \(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_things_are_refused(name: str) -> None:
    ids, message = REFUSED[name]
    with pytest.raises(VkvError, match=message) as exc:
        identity.token_bytes(ids)
    assert exc.value.rule == "I2"


def changed(tokens: tuple[str, ...] = (), special: bool = False, **attributes: Any) -> Any:
    wrapper = tiny.tokenizer()
    if tokens:
        wrapper._tokenizer.add_tokens([AddedToken(t, special=special) for t in tokens], special)
    for name, value in attributes.items():
        setattr(wrapper._tokenizer, name, value)
    return wrapper


def test_wrapper_and_wrapped_are_one_tokenizer() -> None:
    wrapper = tiny.tokenizer()
    assert identity.of_tokenizer(wrapper) == identity.of_tokenizer(wrapper._tokenizer)
    assert identity.of_tokenizer(wrapper) == identity.of_tokenizer(tiny.tokenizer())
    assert identity.of_tokenizer(wrapper).vocab_size == tiny.VOCAB


def test_the_library_below_gives_the_same_vocabulary() -> None:
    """A ``tokenizers.Tokenizer`` knows no first token and no template."""
    wrapper = tiny.tokenizer()
    below = identity.of_tokenizer(wrapper._tokenizer.backend_tokenizer)
    assert below.template is None
    assert below.id == identity.of_tokenizer(wrapper).id  # its first token is special anyhow


def test_the_tokenizers_identity_never_changes() -> None:
    found = identity.of_tokenizer(tiny.tokenizer())
    assert found.id.hex() == TOKENIZER
    assert found.template is not None
    assert found.template == blake3(tiny.tokenizer().chat_template.encode()).digest()


TOKENIZER = "56fb011e2814f40a17513ad6c3004e5a8688db82c66da6b3e34c62f304546c95"

#: name -> (tokenizer, errors, warnings), against the tiny one.
OTHERS: dict[str, tuple[Any, list[str], list[str]]] = {
    "the same": (changed, [], []),
    "padding set": (lambda: changed(pad_token="<|endoftext|>"), [], []),
    "end set": (lambda: changed(eos_token="<|endoftext|>"), [], []),
    "template": (
        lambda: changed(chat_template="{{ messages }}"),
        [],
        ["the chat template is not the one that the file was made with"],
    ),
    "no template": (
        lambda: changed(chat_template=None),
        [],
        ["the chat template is not the one that the file was made with"],
    ),
    "a token more": (
        lambda: changed(("<tool>",)),
        ["vocabulary of 259 tokens in the file, 260 here"],
        [],
    ),
    "begin token": (
        lambda: changed(bos_token="a"),
        ["the tokenizer has other tokens under the same ids, or other special tokens"],
        [],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_tokenizer_is_named(name: str) -> None:
    build, errors, warnings = OTHERS[name]
    stored, live = identity.of_tokenizer(tiny.tokenizer()), identity.of_tokenizer(build())
    assert identity.tokenizer_differences(stored, live) == (errors, warnings)


class Vocabulary:
    """A tokenizer that is nothing but its vocabulary."""

    def __init__(self, *tokens: str):
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def test_order_matters_and_boundaries_are_kept() -> None:
    ids = {
        identity.of_tokenizer(Vocabulary(*tokens)).id
        for tokens in (("a", "b"), ("b", "a"), ("ab",), ("a", "b\n"), ("", "ab"), ("\ud800", "b"))
    }
    assert len(ids) == 6


def test_a_thing_without_vocabulary_is_refused() -> None:
    with pytest.raises(VkvError, match="a dict, expected a tokenizer with get_vocab"):
        identity.of_tokenizer({})
