"""Attention on codes by plain operations, against decoding them first."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.helpers.attention import VARIANTS, case, error
from vkv.caches.attention import portable
from vkv.caches.attention.past import Past
from vkv.codecs.kvquant.codec import KvQuant


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_output_is_that_of_decoded_rows(variant):
    rows = case(variant)
    assert portable.refuses(rows.keys, rows.values) is None
    args = rows.queries, rows.keys, rows.values, rows.scale, variant.length > 1
    assert error(portable.attend(*args), rows) < 2e-3


@pytest.mark.parametrize("variant", VARIANTS[-7:], ids=str)
def test_many_stretches_are_as_one(variant, monkeypatch):
    rows = case(variant)
    monkeypatch.setattr(portable, "STEP", 1)
    args = rows.queries, rows.keys, rows.values, rows.scale, variant.length > 1
    assert error(portable.attend(*args), rows) < 2e-3


def test_codecs_that_cannot_be_cut_are_left_to_decode():
    x = mx.random.normal((1, 1, 64, 64)).astype(mx.float16)
    codec = KvQuant(bits=2, table="shared", pre_rope=False)
    past = Past(codec, codec.encode(x), 64, x)
    assert "kvquant" in portable.refuses(past, past)
