"""Compare the KV heads of stored layers with the model's config (rule I7)."""

from __future__ import annotations

from typing import Any

import msgspec

from vkv.errors import CacheError
from vkv.format.model_config import parse
from vkv.format.schema import Header, Layer, Model
from vkv.identity.config import canonical


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
    known = _known_counts(config)
    for i, layer in enumerate(header.layers if known else ()):
        if _has_heads(layer) and (heads := layer.tensors["keys"].shape[1]) not in known:
            numbers = " or ".join(map(str, sorted(known)[:8]))
            raise CacheError(
                f"{heads} KV heads, the model's config has {numbers}", rule="I7", at=f"layers[{i}]"
            )


def _has_heads(layer: Layer) -> bool:
    """Tell whether a layer has keys and values alike: MLA latents and lists are others."""
    if layer.tensors.keys() != {"keys", "values"}:
        return False
    return layer.tensors["keys"].shape[3] == layer.tensors["values"].shape[3]


def with_heads(model: Model, layers: tuple[Layer, ...]) -> Model:
    """Record numbers of KV heads that the model's caches have, but its config not.

    They stand in the config as ``kv_heads``, which the model's id does not cover.

    Args:
        model: Identity of the model.
        layers: Caches as that model makes them.
    """
    config = parse(model.config)
    counts = {layer.tensors["keys"].shape[1] for layer in layers if _has_heads(layer)}
    config["kv_heads"] = sorted(counts - _known_counts(config))
    return msgspec.structs.replace(model, config=canonical(config))


def _known_counts(config: Any) -> set[int]:
    """Return all numbers of heads that keys may have, if the config has any of KV heads."""
    kv = _head_counts(config, ("key_value", "kv"))
    return kv | _head_counts(config, ("attention",)) if kv else set()


def _head_counts(config: Any, words: tuple[str, ...]) -> set[int]:
    """Collect numbers of heads, anywhere in a config, under names with one of ``words``."""
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
