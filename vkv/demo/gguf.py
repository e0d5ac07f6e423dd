"""A llama model in a GGUF file, written as a model directory that ``mlx_lm.load`` opens.

Covers what the demo model needs: architecture ``llama``, weights that MLX reads
from GGUF (F32, F16, Q4_0, Q4_1, Q8_0), and a byte-level BPE tokenizer whose
pre-tokenizer is ``smollm``. Anything else is refused, never guessed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from vkv.errors import VkvError

__all__ = ["FILES", "convert"]

#: What ``convert`` writes.
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_GROUP = 32  # weights that share a scale, in all three quantized kinds
_CONTROL = 3  # token type of tokens that text never produces
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, out: Path) -> None:
    """Write the files of ``FILES`` into the directory ``out``.

    Weights become float32: on a CPU that is the fast dtype, and it holds the
    dequantized values exactly.

    Args:
        gguf: The GGUF file.
        out: A directory that exists.

    Raises:
        VkvError: The file is not a llama model of the kind above.
    """
    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    tensors, meta = loaded
    for key, want in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if meta.get(key) != want:
            raise VkvError(f"found {meta.get(key)!r}, expected {want!r}", at=key)
    config = _config(meta, tied="output.weight" not in tensors)
    _dump(out / "config.json", config)
    _dump(out / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _dump(out / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(out / "tokenizer.json"))
    with mx.stream(mx.cpu):  # the same bytes on every machine
        weights = _weights(tensors, config)
        mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(meta[key].item())

    heads = number("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.embedding_length") // heads,
        "max_position_embeddings": number("llama.context_length"),
        "rms_norm_eps": _decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(meta["llama.rope.freq_base"]),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _decimal(value: mx.array) -> float:
    """Return the decimal that was meant: 1e-05, where float32 says 9.999999747378752e-06."""
    return float(f"{value.item():.7g}")


def _weights(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    out = {}
    for name in sorted(n for n in tensors if n.endswith(".weight")):
        stem = name.removesuffix(".weight")
        weight = _dense(tensors, stem)
        if (kind := stem.rpartition(".")[2]) in heads:
            weight = _half_split(weight, heads[kind])
        out[f"{_module(stem)}.weight"] = weight
    return out


def _module(stem: str) -> str:
    """Rename ``blk.3.attn_q`` to ``model.layers.3.self_attn.q_proj``."""
    block, _, kind = stem.rpartition(".")
    if stem == "output":
        return "lm_head"
    if kind not in _NAMES:
        raise VkvError(f"found tensor {stem!r}, expected one of {', '.join(_NAMES)}")
    return ".".join(filter(None, ("model", block.replace("blk", "layers"), _NAMES[kind])))


def _dense(tensors: dict[str, mx.array], stem: str) -> mx.array:
    """Return one weight in float32.

    ``scale * code`` has at most 8 + 11 significant bits, so float32 holds it
    without rounding and a fused multiply-add gives the same sum as two steps.
    """
    weight, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        tensors[f"{stem}.biases"].astype(mx.float32),
        group_size=_GROUP,
        bits=weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP),
    )


def _half_split(weight: mx.array, heads: int) -> mx.array:
    """Reorder rows of each head from GGUF's order (x0 y0 x1 y1 …) to mlx-lm's (x0 x1 … y0 y1 …)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(meta: dict[str, Any]) -> Any:
    """Build a byte-level BPE tokenizer in which each digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]

    def token(name: str) -> str:
        return str(tokens[meta[f"tokenizer.ggml.{name}_token_id"].item()])

    return {
        # Named classes (GPT2Tokenizer …) bring a pre-tokenizer of their own, which keeps
        # digits together; this one takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": int(meta["llama.context_length"].item()),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
