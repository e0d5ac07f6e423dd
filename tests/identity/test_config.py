"""What a recorded configuration leaves out: only what is proven equal to what stays."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv import identity
from vkv.errors import MismatchError
from vkv.identity.config import config_texts

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@dataclass
class Args:
    """A configuration with any fields."""

    model_type: str = "any"
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    text_config: dict[str, Any] = field(default_factory=dict)
    router_jitter_noise: float | None = None
    max_position_embeddings: int | None = None


def recorded(**fields: Any) -> Any:
    model = nn.Module()
    model.args = Args(**fields)
    return json.loads(config_texts(model, set())[1])["args"]


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 1e4, **YARN},  # nothing beside it says the factor
        {"rope_theta": 2e4},  # another base than the one beside it
        {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
        {"full_attention": {"rope_theta": 1e4}},
        YARN,
    ],
)
def test_rope_parameters_stay_where_they_say_more(settings):
    assert recorded(rope_theta=1e4, rope_parameters=settings)["rope_parameters"] == {
        k: {"rope_theta": 10000} if isinstance(v, dict) else v for k, v in settings.items()
    }
    nested = {"rope_theta": 1e4, "rope_parameters": settings}
    assert "rope_parameters" in recorded(text_config=nested)["text_config"]


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"rope_theta": 1e4}, None),
        ({"rope_theta": 1e4, "rope_type": "default"}, None),
        ({"rope_theta": 1e4, **YARN}, YARN),
        ({"rope_theta": 1e4, **YARN}, {"type": "yarn", "rope_theta": 1e4, **YARN}),
    ],
)
def test_rope_parameters_go_where_all_is_said_beside_them(settings, scaling):
    """Classes take the older fields from the newer one; both forms are one model."""
    new = recorded(rope_theta=1e4, rope_parameters=settings, rope_scaling=scaling)
    assert new == recorded(rope_theta=1e4, rope_scaling=scaling and YARN)


@pytest.mark.parametrize(
    ("scaling", "kept"),
    [
        ({"type": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2}),
        ({"short_factor": 1.5}, {"short_factor": 1.5}),  # read without any type
        ({"type": "default", "long_factor": 3.0}, {"rope_type": "default", "long_factor": 3}),
        ({"type": "su", "rope_type": "yarn"}, {"type": "su", "rope_type": "yarn"}),
        ({"type": "default"}, None),
        ({"rope_type": "default"}, None),
    ],
)
def test_rope_scaling(scaling, kept):
    assert recorded(rope_theta=1e4, rope_scaling=scaling).get("rope_scaling") == kept
    assert recorded(rope_scaling=scaling).get("rope_scaling") == kept


def test_jitter_of_a_router_is_recorded():
    assert recorded(router_jitter_noise=0.01)["router_jitter_noise"] == 0.01


def alike(model: Any, other: Any) -> Any:
    """``other`` with the weights of ``model``."""
    other.update(tree_unflatten(tree_flatten(model.parameters())))
    return other


def saved(path: Any, model: Any) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    vkv.save(path, cache, tokens=[1, 2, 3], model=model)
    return cache


def test_a_longer_maximum_that_no_layer_reads_warns(tmp_path):
    short, long = (tiny.llama(max_positions=n) for n in (512, 1024))
    cache = saved(tmp_path / "a.vkv", short)
    assert identity.of_model(short)[0].id == identity.of_model(alike(short, long))[0].id
    with pytest.warns(UserWarning, match=r"max_position_embeddings is 512 in the file, 1024 in"):
        again = vkv.load(tmp_path / "a.vkv", model=long).cache
    assert mx.array_equal(again[0].keys[..., :3, :], cache[0].keys[..., :3, :])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vkv.load(tmp_path / "a.vkv", model=short)


@pytest.mark.skipif(version("mlx-lm") < "0.32", reason="0.31 has no dynamic rope")
def test_a_longer_maximum_that_a_rope_reads_is_refused(tmp_path):
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    short, long = (tiny.llama(max_positions=n, rope_scaling=dynamic) for n in (512, 1024))
    saved(tmp_path / "a.vkv", short)
    with pytest.raises(MismatchError, match="max_position_embeddings is 512 in the file, 1024"):
        vkv.load(tmp_path / "a.vkv", model=alike(short, long))


def test_heads_of_a_tensor_parallel_rank(tmp_path):
    """It has half of the heads that its configuration says."""
    model = tiny.llama(layers=1)
    attention = model.layers[0].self_attn
    heads, dim = attention.n_kv_heads, attention.k_proj.weight.shape[0] // attention.n_kv_heads
    attention.n_kv_heads, attention.n_heads = heads // 2, attention.n_heads // 2
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(attention, name)
        projection.weight = projection.weight[: projection.weight.shape[0] // 2]
    attention.o_proj.weight = attention.o_proj.weight[:, : attention.n_heads * dim]
    cache = saved(tmp_path / "a.vkv", model)
    assert cache[0].keys.shape[1] == heads // 2
    for options in ({"model": model}, {}):
        (loaded,) = vkv.load(tmp_path / "a.vkv", **options).cache
        assert mx.array_equal(loaded.keys[..., :3, :], cache[0].keys[..., :3, :])
    assert vkv.validate(tmp_path / "a.vkv", model=model, deep=True).ok
    vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", model=model)
    assert vkv.load(tmp_path / "b.vkv", model=model).tokens == [1, 2, 3]
