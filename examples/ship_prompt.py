"""Compute a long system prompt once, and ship it as a file.

python examples/ship_prompt.py MODEL SYSTEM.txt sys.vkv
"""

import sys
from pathlib import Path

from mlx_lm import load

import vkv
from vkv.caches import chat

name, text, out = sys.argv[1:]
model, tokenizer = load(name)

system = {"role": "system", "content": Path(text).read_text(encoding="utf-8")}
ids = chat.opening(tokenizer, [system])  # through the model's chat template
prompt = vkv.prefill(model, ids)

info = vkv.save(
    out,
    prompt.cache,
    tokens=ids,
    model=model,
    tokenizer=tokenizer,
    codec="affine:bits=8,group=32",
    metadata={"about": "the house rules"},
)
print(f"{info.tokens} tokens, {info.size:,} bytes, id {info.id[:12]}")
