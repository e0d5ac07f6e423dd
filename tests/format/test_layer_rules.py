"""What a layer may not claim: rows that cost nothing to store."""

from __future__ import annotations

import pytest

from vkv.errors import CacheError, HeaderError
from vkv.format.layer_rules import check_layer, check_layers
from vkv.format.schema import Header, Layer, Model, Segment, Tensor, Tokens
from vkv.identity.heads import check_heads


@pytest.mark.parametrize("shape", [(0, 2, 1 << 30, 8), (1, 0, 1 << 30, 8), (1, 2, 1 << 30, 0)])
@pytest.mark.parametrize("kind", ["kv", "rotating"])
def test_rows_without_elements_are_refused(kind, shape):
    ring = {"keep": 0, "max_size": shape[2], "idx": shape[2]} if kind == "rotating" else {}
    segment = Segment(codec="raw", version=1, params={"dtype": "F16"}, tokens=shape[2], parts={})
    tensor = Tensor(dtype="F16", shape=shape, segments=(segment,))
    layer = Layer(
        kind=kind,
        scalars={"offset": shape[2]} | ring,
        tensors={"keys": tensor, "values": tensor},
    )
    with pytest.raises(CacheError, match=r"expected sizes above 0 \[L4\]"):
        check_layer(layer, "layers[0]")


def with_config(config: str, *heads: int) -> Header:
    def layer(count: int) -> Layer:
        segment = Segment(codec="raw", version=1, params={"dtype": "F16"}, tokens=3, parts={})
        tensor = Tensor(dtype="F16", shape=(1, count, 3, 4), segments=(segment,))
        tensors = {"keys": tensor, "values": tensor}
        return Layer(kind="kv", scalars={"offset": 3}, tensors=tensors)

    model = Model(id=bytes(32), type="t", config=config, parameters=0, layers=(), rest=bytes(32))
    layers = tuple(map(layer, heads))
    return Header(version="1.0", producer="", model=model, layers=layers, tensors={})


@pytest.mark.parametrize(
    ("config", "heads", "at"),
    [
        ('{"args":{"num_attention_heads":8,"num_key_value_heads":2}}', (2, 2, 8), None),
        ('{"num_kv_heads":[1,2,4]}', (4, 1), None),
        ('{"num_attention_heads":64,"num_attention_groups":8}', (8,), None),  # says nothing of KV
        ('{"text_config":[{"num_key_value_heads":2}]}', (2, 2, 1), "layers[2]"),
        ('{"kv_heads":[0,-1,2.0,true,2305843009213693951,"1"],"x_kv_heads":3}', (1,), "layers[0]"),
        ('{"":' * 30 + '{"kv_heads":[' + "1," * 100_000 + "2]}" + "}" * 30, (3,), "layers[0]"),
    ],
)
def test_heads_are_those_of_the_config(config, heads, at):
    if at is None:
        check_heads(with_config(config, *heads))
        return
    with pytest.raises(CacheError) as caught:
        check_heads(with_config(config, *heads))
    assert (caught.value.rule, caught.value.at) == ("I7", at)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("config", "rule"),
    [("[1,", "H2"), ('{"x":Infinity}', "H2"), ('"' + "x" * (1 << 18) + '"', "H13"),
     ("[" * 34 + "]" * 34, "H13"), ("[" * 100_000 + "]" * 100_000, "H2")],
)  # fmt: skip
def test_a_config_is_json_of_some_size(config, rule):
    with pytest.raises(HeaderError) as caught:
        check_heads(with_config(config, 1))
    assert (caught.value.rule, caught.value.at) == (rule, "model.config")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("offsets", "tokens", "text"),
    [
        ((51, 50, 50), None, "holds 50 tokens, but layers[0] holds 51"),
        ((0, 50, 51), None, "holds 51 tokens, but layers[1] holds 50"),
        ((0, 50, 50), None, None),
        ((0, 0), None, None),
        ((50, 50), 50, None),
        ((50, 50), 51, "holds 50 tokens, but there are 51 token ids"),
        ((0, 50), 0, "holds 50 tokens, but there are 0 token ids"),
    ],
)
def test_all_layers_hold_as_many_tokens(offsets, tokens, text):
    segment = Segment(codec="raw", version=1, params={"dtype": "F16"}, parts={})
    layers = []
    for offset in offsets:
        tensor = Tensor(dtype="F16", shape=(1, 1, offset, 4), segments=(segment,))
        tensors = {"keys": tensor, "values": tensor} if offset else {}
        layers.append(Layer(kind="kv", scalars={"offset": offset}, tensors=tensors))
    ids = None if tokens is None else Tokens(count=tokens, digest=bytes(32), tensor="t")
    nested = (layers[0], Layer(kind="list", children=tuple(layers[1:])))
    for given in (tuple(layers), nested):
        head = Header(version="1.0", producer="", tokens=ids, layers=given, tensors={})
        if text is None:
            check_layers(head)
            continue
        with pytest.raises(CacheError) as caught:
            check_layers(head)
        assert caught.value.rule == "L6"
        assert given is nested or caught.value.message == text
