"""Go on from a file in a conversation, and save what it grew by.

python examples/resume_chat.py MODEL sys.vkv turn.vkv
"""

import sys

from mlx_lm import load

import vkv

name, file, out = sys.argv[1:]
model, tokenizer = load(name)
prompt = vkv.load(file, model=model, tokenizer=tokenizer)  # another model is refused

for question in ("When do you open?", "And on Sundays?"):
    print(f"> {question}")
    for response in prompt.chat(model, tokenizer, question, max_tokens=32):
        print(response.text, end="", flush=True)
    print()

# Only what is new is written; the file refers to the one it grew from by its id.
info = vkv.save(
    out,
    prompt.cache,
    tokens=prompt.tokens,
    model=model,
    tokenizer=tokenizer,
    codec="affine:bits=8,group=32",
    parent=file,
)
print(f"{info.tokens} tokens, {info.size:,} bytes, depends on {len(info.dependencies)} file")
