"""A small GGUF file with known weights, written from the format's description."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, FFN = 2, 4, 2, 16, 64, 96
MERGES = ["h e", "l l", "ll o", "he llo"]
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.context_length": 512,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "output_norm": (HIDDEN,),
    **{
        f"blk.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * DIM, HIDDEN),
            "attn_k": (KV_HEADS * DIM, HIDDEN),
            "attn_v": (KV_HEADS * DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items()
    },
}
F32, Q4_1, Q8_0 = 0, 3, 8


def tensor(kind: int, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """Bytes of a tensor in GGUF, and the float32 values that GGML says they have."""
    if kind == F32:
        ones = np.ones(shape, np.float32)
        return ones.tobytes(), ones
    blocks = int(np.prod(shape)) // 32
    scale = rng.uniform(0.01, 0.03, (blocks, 1)).astype(np.float16)
    if kind == Q8_0:
        codes = rng.integers(-127, 128, (blocks, 32)).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
        return data.tobytes(), (scale.astype(np.float32) * codes).reshape(shape)
    least = rng.uniform(-0.3, -0.1, (blocks, 1)).astype(np.float16)
    nibbles = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
    packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    data = np.concatenate([scale.view(np.uint8), least.view(np.uint8), packed], axis=1)
    value = scale.astype(np.float32) * nibbles + least.astype(np.float32)
    return data.tobytes(), value.reshape(shape)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value: Any) -> bytes:
    """A metadata value, its type first."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()


def write_gguf(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A whole GGUF file with random weights; their values by name."""
    rng, meta = np.random.default_rng(0), META | changes
    infos, data, values = b"", b"", {}
    for name, shape in SHAPES.items():
        kind = Q8_0 if name == "token_embd" else Q4_1 if len(shape) == 2 else F32
        raw, values[name] = tensor(kind, shape, rng)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += text(f"{name}.weight") + dims + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    fields = b"".join(text(key) + field(value) for key, value in meta.items())
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(SHAPES), len(meta)) + fields + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return values
