"""Store prompts: each is prefilled once and found again, across processes.

::

    store = vkv.PromptStore(max_bytes="20GB")
    hit = store.get(tokens, model=model)          # the longest stored prefix, or None
    store.put(cache, tokens, model=model, tokenizer=tokenizer)

Entries are ``.vkv`` files named by their id. Beside them stands an index, which can
be made again from the files at any time (``spec/decisions/0005-store-index.md``).
"""

from vkv.store.remote.remote import Remote
from vkv.store.results import Entry, Found, Hit
from vkv.store.store import PromptStore
from vkv.store.tiered import TieredStore

__all__ = ["Entry", "Found", "Hit", "PromptStore", "Remote", "TieredStore"]
