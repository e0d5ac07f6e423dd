"""Identity of models: what must differ, what must not, and in which words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from fixtures.models import tiny
from vkv import identity
from vkv.format import header
from vkv.format.schema import Header, Layer
from vkv.identity.compare import MAX_FIELDS
from vkv.identity.model import SAMPLE, sampled_bits

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def differences(stored: Any, live: Any) -> list[str]:
    return identity.differences(*identity.of_model(stored), *identity.of_model(live))


def exact(model: Any) -> Any:
    """The model with weights that every backend makes alike, whatever its random numbers."""
    flat = []
    for i, (name, x) in enumerate(tree_flatten(model.parameters())):
        values = (mx.arange(i, i + x.size) % 251).reshape(x.shape)
        whole = not mx.issubdtype(x.dtype, mx.floating)
        flat.append((name, (values if whole else values / 64).astype(x.dtype)))
    model.update(tree_unflatten(flat))
    return model


def quantized(bits: int, model: Any = None) -> Any:
    model = model or tiny.llama()
    nn.quantize(model, group_size=32, bits=bits)
    return model


def changed(name: str, change: Callable[[mx.array], mx.array], **options: Any) -> Any:
    model = tiny.llama(**options)
    parameters = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(name, change(parameters[name]))]))
    return model


def swapped(a: int, b: int, count: int) -> Any:
    model = tiny.llama(layers=count)
    layers = model.model.layers
    layers[a], layers[b] = layers[b], layers[a]
    return model


def rotated(count: int) -> Any:
    model = tiny.llama(layers=count)
    model.model.layers = model.model.layers[1:] + model.model.layers[:1]
    return model


def with_rope(layer: int, **attributes: float) -> Any:
    model = tiny.llama(layers=4)
    rope = model.layers[layer].self_attn.rope
    for name, value in attributes.items():
        setattr(rope, name, value)
    return model


def fused(model: Any) -> Any:
    """The adapter of ``with_lora`` folded into the weights."""
    parts = [(n, m.fuse()) for n, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(parts))
    return model


def lora(scale: float = 2.0) -> Any:
    model = tiny.with_lora(tiny.llama())
    for module in model.modules():
        if "lora_a" in module:
            module.scale = scale
    return model


#: name -> (stored, live, one pattern for each difference)
WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "other weights": (
        lambda: tiny.llama(seed=0),
        lambda: tiny.llama(seed=1),
        ["weights of layers 0 to 1 differ", r"weights outside the layers \(embeddings, .* differ"],
    ),
    "one layer": (
        lambda: tiny.llama(layers=4),
        lambda: changed("model.layers.2.self_attn.k_proj.weight", lambda w: w + 0.01, layers=4),
        ["weights of layer 2 differ"],
    ),
    "embeddings": (
        tiny.llama,
        lambda: changed("model.embed_tokens.weight", lambda w: w * 1.01),
        ["weights outside the layers"],
    ),
    "rope base": (
        tiny.llama,
        lambda: tiny.llama(rope_theta=500_000.0),
        [
            "rope_theta is 10000 in the file, 500000 in the model",
            "rotary embedding of layers 0 to 1: base is 10000 in the file, 500000 in the model",
        ],
    ),
    "rope factor": (
        lambda: tiny.llama(rope_scaling=LLAMA3),
        lambda: tiny.llama(rope_scaling=LLAMA3 | {"factor": 32.0}),
        [
            r"rope_scaling\.factor is 8 in the file, 32 in the model",
            "rotary embedding of layers 0 to 1: other frequencies in the file",
        ],
    ),
    "rope scaling or none": (
        tiny.llama,
        lambda: tiny.llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        [
            r"rope_scaling\.factor is not set in the file, 4 in the model",
            r"rope_scaling\.rope_type is not set in the file, linear in the model",
            "rotary embedding of layers 0 to 1: scale is 1 in the file, 0.25 in the model",
        ],
    ),
    "rope changed in place": (
        lambda: tiny.llama(layers=4),
        lambda: with_rope(2, base=20_000.0),
        ["rotary embedding of layer 2: base is 10000 in the file, 20000 in the model"],
    ),
    "traditional rope": (
        lambda: tiny.llama(layers=4),
        lambda: with_rope(0, traditional=True),
        ["rotary embedding of layer 0: traditional is false in the file, true in the model"],
    ),
    "adapter loaded": (
        tiny.llama,
        lora,
        [r"adapter .* is none in the file, LoRALinear, rank 4, scale 2 \(14 modules\) in the"],
    ),
    "adapter not loaded": (
        lora,
        tiny.llama,
        [r"adapter .* is LoRALinear, rank 4, scale 2 \(14 modules\) in the file, none in the"],
    ),
    "adapter with another scale": (
        lora,
        lambda: lora(scale=1.0),
        [r"adapter .* scale 2 .* in the file, LoRALinear, rank 4, scale 1 .* in the model"],
    ),
    "adapter fused": (
        tiny.llama,
        lambda: fused(lora()),
        ["weights of layers 0 to 1 differ"],
    ),
    "fewer layers": (
        lambda: tiny.llama(layers=2),
        lambda: tiny.llama(layers=3),
        ["2 layers in the file, 3 in the model"],
    ),
    "two layers swapped": (
        lambda: tiny.llama(layers=6),
        lambda: swapped(3, 5, 6),
        ["layers 3 and 5 are swapped"],
    ),
    "layers rotated": (
        lambda: tiny.llama(layers=4),
        lambda: rotated(4),
        ["layers 0 to 3 are in another order"],
    ),
    "KV heads": (
        lambda: tiny.llama(kv_heads=1),
        lambda: tiny.llama(kv_heads=2),
        ["num_key_value_heads is 1 in the file, 2 in the model"],
    ),
    "quantized or not": (
        tiny.llama,
        lambda: quantized(4),
        [r"quantization .* is none in the file, 4 bits in groups of 32 \(15 modules\) in the"],
    ),
    "quantized otherwise": (
        lambda: quantized(4),
        lambda: quantized(8),
        [r"quantization .* is 4 bits in groups of 32 .* in the file, 8 bits in groups of 32"],
    ),
    "quantized from other weights": (
        lambda: quantized(4),
        lambda: quantized(4, tiny.llama(seed=1)),
        ["weights of layers 0 to 1 differ", "weights outside the layers"],
    ),
    "dtype": (
        tiny.llama,
        lambda: tiny.llama(dtype=mx.float16),
        ["dtype of the weights is float32 in the file, float16 in the model"],
    ),
    "architecture": (
        tiny.llama,
        tiny.gemma3_text,
        ["architecture is llama in the file, gemma3_text in the model", "2 layers in the file, 3"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_named(name: str) -> None:
    stored, live, expected = WRONG[name]
    found = differences(stored(), live())
    for pattern in expected:
        assert any(re.search(pattern, text) for text in found), (pattern, found)
    if name != "architecture":
        assert len(found) == len(expected), found


@pytest.mark.parametrize("name", [n for n in WRONG if not n.startswith(("rope changed", "trad"))])
def test_a_wrong_model_has_another_id(name: str) -> None:
    stored, live, _ = WRONG[name]
    assert identity.of_model(stored())[0].id != identity.of_model(live())[0].id


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_same_model_built_again_is_the_same(name: str) -> None:
    build = tiny.MODELS[name]
    assert identity.of_model(build()) == identity.of_model(build())
    assert differences(build(), build()) == []


#: Weights are whole numbers by 64, so these hold on every backend and for every mlx-lm.
GOLDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (
        tiny.llama,
        "fe88572684631737b93e68c0d70576bd3c4d32c88c4b9f070f2be26e8d81296e",
    ),
    "quantized bfloat16": (
        lambda: quantized(4, tiny.llama(dtype=mx.bfloat16)),
        "f2c32e41d9917039d28e568e486cd297127c67bc1efb47b67798a5f98570d011",
    ),
    "rope frequencies": (
        lambda: tiny.llama(rope_scaling=LLAMA3),
        "8066a435dd3f421fb2b988d80a2dee144810b5df4c30fb322dd92a26096e22da",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_never_change(name: str) -> None:
    build, golden = GOLDEN[name]
    assert identity.of_model(exact(build()))[0].id.hex() == golden


def test_one_ulp_of_a_frequency_is_no_difference() -> None:
    """Backends compute powers that differ by an ulp or so."""
    stored, live = (tiny.llama(rope_scaling=LLAMA3) for _ in range(2))
    ropes = [layer.self_attn.rope for layer in live.layers]
    for rope in ropes:
        rope._freqs = (rope._freqs.view(mx.uint32) + 1).view(mx.float32)
    assert identity.of_model(stored)[1] != identity.of_model(live)[1]
    assert differences(stored, live) == []
    assert identity.of_model(stored)[0].id == identity.of_model(live)[0].id
    ropes[1]._freqs *= 1.001
    assert len(differences(stored, live)) == 1


def test_a_rope_that_only_one_side_knows_is_no_difference() -> None:
    """A class that another release of mlx-lm has under another name."""
    stored, ropes = identity.of_model(tiny.llama())
    unknown = msgspec.structs.replace(stored, ropes=(None, None))
    assert identity.differences(unknown, (), stored, ropes) == []
    assert identity.differences(stored, ropes, unknown, ()) == []


def test_equal_ropes_are_shared() -> None:
    model, ropes = identity.of_model(tiny.gemma3_text())
    assert model.ropes == (0, 0, 1)
    assert [rope.base for rope in ropes] == [10_000.0, 1_000_000.0]


def test_the_header_takes_the_identity() -> None:
    model, ropes = identity.of_model(tiny.llama(rope_scaling=LLAMA3))
    layers = (Layer(kind="kv", scalars={"offset": 0}),) * len(model.ropes)
    head = Header(version="1.0", producer="t", model=model, ropes=ropes, layers=layers, tensors={})
    back = header.load(header.dump(head))
    assert (back.model, back.ropes) == (model, ropes)


#: Joined, these names would take a gigabyte.
LONG_NAME = json.dumps({"x" * 120_000: {f"{i:x}": 0 for i in range(10_000)}}, separators=(",", ":"))


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[1]",
        "{",
        LONG_NAME,
        '{"args":' * 5000,
        '{"args":1e999}',
        '"' + "x" * 5000 + '"',
        "\ud800",
    ],
)
def test_a_hostile_config_is_one_short_difference(config: str) -> None:
    live, ropes = identity.of_model(tiny.llama())
    stored = msgspec.structs.replace(live, config=config)
    found = identity.differences(stored, ropes, live, ropes)
    assert found
    assert max(map(len, found)) < 300
    assert len(found) <= MAX_FIELDS + 4


BITS = {
    "float32": (mx.float32, (3, 50)),
    "bfloat16": (mx.bfloat16, (7, 64)),
    "float16": (mx.float16, (300,)),
    "uint32": (mx.uint32, (2, 3, 100)),
    "uint8": (mx.uint8, (11, 13)),
    "bool": (mx.bool_, (5, 40)),
    "complex64": (mx.complex64, (4, 40)),
    "scalar": (mx.float32, ()),
    "few": (mx.float32, (3,)),
    "one": (mx.float32, (1, 1)),
    "none": (mx.float32, (0, 4)),
}


@pytest.mark.parametrize("name", BITS)
def test_sampled_bits_are_those_of_the_array(name: str) -> None:
    dtype, shape = BITS[name]
    x = (mx.random.normal(shape, key=mx.random.key(0)) * 100).astype(dtype)
    flat = np.array(x.reshape(-1).view(mx.uint8)).reshape(x.size, x.itemsize)
    count = min(SAMPLE, x.size)
    where = [i * (x.size - 1) // max(count - 1, 1) for i in range(count)]
    assert np.array_equal(np.array(sampled_bits(x)), flat[where].reshape(-1))


def test_sampling_sees_the_first_and_the_last_value_and_takes_any_layout() -> None:
    x = mx.random.normal((40, 30), key=mx.random.key(0))
    for index in ((0, 0), (39, 29)):
        assert not mx.array_equal(sampled_bits(x), sampled_bits(x.at[index].add(1)))
    assert mx.array_equal(sampled_bits(x.T), sampled_bits(mx.contiguous(x.T)))
    nan = mx.full((100,), mx.nan).view(mx.uint32) + mx.arange(100, dtype=mx.uint32)
    assert mx.array_equal(sampled_bits(nan.view(mx.float32)), sampled_bits(nan))


@pytest.mark.parametrize(("mode", "bits"), [("affine", 3), ("affine", 8), ("mxfp4", 4)])
def test_parameters_are_the_weights_that_packed_words_stand_for(mode: str, bits: int) -> None:
    model = tiny.llama()
    plain = identity.of_model(model)[0].parameters
    nn.quantize(model, 32, bits, mode=mode)
    assert identity.of_model(model)[0].parameters == plain
