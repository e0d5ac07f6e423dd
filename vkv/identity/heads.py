"""Compare the KV heads of stored layers with the model's config (rule I7)."""

from __future__ import annotations

from typing import Any

from vkv.errors import CacheError
from vkv.format.model_config import parse
from vkv.format.schema import Header


def check_heads(header: Header) -> None:
    """Refuse caches whose number of KV heads the model's config does not have (I7).

    Attention broadcasts one head over several without an error. MLA latents, whose
    keys and values differ in width, have one "head" by design; so have second caches of
    a layer, which stand in lists.

    Raises:
        CacheError: Says both numbers.
        HeaderError: The config is not JSON (H2), or too large (H13).
    """
    if header.model is None:
        return
    config = parse(header.model.config)
    own = _head_counts(config, ("key_value", "kv"))
    known = own | _head_counts(config, ("attention",))
    for i, layer in enumerate(header.layers if own else ()):
        if layer.tensors.keys() != {"keys", "values"}:
            continue
        keys, values = layer.tensors["keys"].shape, layer.tensors["values"].shape
        if keys[3] == values[3] and keys[1] not in known:
            numbers = " or ".join(map(str, sorted(known)[:8]))
            raise CacheError(
                f"{keys[1]} KV heads, the model's config has {numbers}",
                rule="I7",
                at=f"layers[{i}]",
            )


def _head_counts(config: Any, words: tuple[str, ...]) -> set[int]:
    """Numbers of heads, anywhere in a config, under names with one of ``words``."""
    found: set[int] = set()
    todo = [config]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
            for key, item in value.items():
                if "heads" in key and any(word in key for word in words):
                    counts = item if isinstance(item, list) else [item]
                    found.update(n for n in counts if type(n) is int and 0 < n < 1 << 31)
    return found
