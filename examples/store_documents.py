"""Put documents into a store by name, and ask about one of them.

    python examples/store_documents.py MODEL FOLDER STORE

`vkv prefill FOLDER --store STORE --model MODEL` does the first half, and can be interrupted.
"""

import sys
from pathlib import Path

from mlx_lm import load, stream_generate

import vkv
from vkv.caches import chat

name, folder, place = sys.argv[1:]
model, tokenizer = load(name)

with vkv.PromptStore(place, max_bytes="20GB") as store:
    for path in sorted(Path(folder).glob("*.txt")):
        message = {"role": "user", "content": path.read_text(encoding="utf-8")}
        ids = chat.opening(tokenizer, [message])  # the message stays open: a question can follow
        prompt = vkv.prefill(model, ids)
        store.put(prompt.cache, ids, model=model, tokenizer=tokenizer, name=path.stem)
    for entry in store:
        print(f"{entry.name}: {entry.tokens} tokens, {entry.size:,} bytes")

    text = path.read_text(encoding="utf-8") + "\n\nWhat is it about?"
    message = {"role": "user", "content": text}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    hit = store.get(ids, model=model)
    print(f"{hit.tokens} of {len(ids)} tokens were stored")
    for response in stream_generate(
        model, tokenizer, hit.rest, prompt_cache=hit.cache, max_tokens=32
    ):
        print(response.text, end="", flush=True)
    print()
