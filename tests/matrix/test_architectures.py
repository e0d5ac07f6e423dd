"""Save, load, resume, trim and refuse, over the architectures of mlx-lm.

A sample runs always. With ``VKV_MLX_LM_SDIST`` set to an unpacked source distribution of
mlx-lm, slow tests run all that it has configurations for; ``python -m tests.matrix`` prints
them as a table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.checks import Architecture, changed, not_here
from tests.matrix.configs import Config, configs, source

COMMON: Config = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1000.0,
    "max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
#: One of each kind of cache and rope; the latents of ``deepseek_v3`` are as wide as its ropes.
SAMPLE: dict[str, Config] = {
    "llama": {**COMMON, "rope_scaling": {**YARN, "type": "yarn"}},
    "qwen3": {**COMMON, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {**COMMON, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2,
                    "query_pre_attn_scalar": 16},
    "deepseek_v3": {**COMMON, **MLA},
    "ministral3": {**COMMON, "head_dim": 16, "tie_word_embeddings": True, "layer_types": None,
                   "rope_parameters": {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.1, **YARN}},
    "mamba2": {"num_heads": 4, "head_dim": 16, "vocab_size": 64, "hidden_size": 32, "state_size": 8,
               "intermediate_size": 64,
               "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5, "conv_kernel": 3, "n_groups": 1,
               "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
               "time_step_limit": [0.01, 10.0], "time_step_rank": 4},
}  # fmt: skip
#: What the sample must say: trimmed or not, another base of the rope, another maximal length.
EXPECTED = {
    "llama": ("trimmed", "refused", "same"),
    "qwen3": ("trimmed", "refused", "same"),
    "gemma3_text": ("cannot", "refused", "same"),
    "deepseek_v3": ("trimmed", "refused", "same"),
    "ministral3": ("trimmed", "refused", "same"),
    "mamba2": ("cannot", "none", "same"),
}
SDIST = source()
ALL = configs(SDIST) if SDIST else {}


def results(name: str, config: Config, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for check, result in Architecture(name, {"model_type": name, **config}, folder).checks():
        if isinstance(result, Exception):
            raise result
        found[check] = result
    return found


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name, tmp_path):
    found = results(name, SAMPLE[name], tmp_path)
    assert (found["trim"], found["rope"], found["length"]) == EXPECTED[name]


def test_settings_are_changed_at_any_depth():
    config = {"a": 1, "text_config": {"rope_theta": 2.0, "rope_parameters": {"rope_theta": 2.0}}}
    inner = {"rope_theta": 6.0, "rope_parameters": {"rope_theta": 6.0}}
    assert changed(config, "rope_theta", 3.0) == {"a": 1, "text_config": inner}
    assert changed({"a": 1}, "rope_theta", 3.0) is None


@pytest.mark.slow
@pytest.mark.skipif(SDIST is None, reason="needs VKV_MLX_LM_SDIST")
@pytest.mark.parametrize("name", ALL)
def test_every_architecture(name, tmp_path):
    try:
        results(name, ALL[name], tmp_path)
    except (Exception, SystemExit) as exc:
        if not (reason := not_here(exc)):
            raise
        pytest.skip(reason)
