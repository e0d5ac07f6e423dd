"""Share prompts between machines through a bucket.

    python examples/share_remote.py MODEL sys.vkv s3://bucket/prompts

On the first machine a file is pushed. On the second, whose local store is empty, its tokens
are found in the bucket, fetched, checked and used.
"""

import sys
import tempfile

from mlx_lm import load

import vkv

name, file, url = sys.argv[1:]
model, tokenizer = load(name)

# The first machine.
key = vkv.Remote(url).push(file)
print(f"pushed {key[:12]}")

# The second machine.
with tempfile.TemporaryDirectory() as place:
    store = vkv.TieredStore(place + "/store", remote=url)
    prompt = vkv.load(file).tokens + tokenizer.encode("When do you open?")
    hit = store.get(prompt, model=model)
    print(f"{hit.tokens} of {len(prompt)} tokens came from the bucket")
    store.close()
