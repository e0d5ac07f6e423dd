"""Say what of a model's caches is not packed, in layers and bytes, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from vkv.caches.kinds.live import inner
from vkv.caches.packed.cache import PackedKVCache
from vkv.codecs.protocol import Codec
from vkv.format.layers import LATENTS, is_latent


def unpacked(caches: Sequence[Any], *, sizes: bool = False) -> list[str]:
    """Return one sentence for each reason why something is not packed.

    Args:
        caches: One per layer, packed or of mlx-lm.
        sizes: Say how many bytes these caches hold, of how many in all.

    Returns:
        Nothing if every cache holds codes.
    """
    leaves = [(i, leaf) for i, cache in enumerate(caches) for leaf in _leaves(cache)]
    places: dict[str, list[tuple[int, Any]]] = {}
    for i, leaf in leaves:
        if (reason := _reason(leaf)) is not None:
            places.setdefault(reason, []).append((i, leaf))
    total = sum(leaf.nbytes for _, leaf in leaves) if sizes else 0
    return [
        f"{_layers([i for i, _ in found])} of {len(caches)}: {reason}"
        + (f"; {sum(c.nbytes for _, c in found):,} of {total:,} bytes" if sizes else "")
        for reason, found in places.items()
    ]


def planned(codecs: Iterable[type[Codec]]) -> list[str]:
    """Return one sentence for each codec that is made for files, and not for packed caches."""
    return [
        f"codec {codec.id} finds its steps for a whole cache when a file is written; a packed "
        "cache encodes new tokens with fixed steps, which cost three times the KL. Use another "
        f"codec here, or dense caches and vkv.save(..., codec={codec.id!r})"
        for codec in dict.fromkeys(codecs)
        if codec.traits.plans
    ]


def _leaves(cache: Any) -> Iterator[Any]:
    children = inner(cache)
    if not children:
        yield cache
    for child in children:
        yield from _leaves(child)


def _reason(cache: Any) -> str | None:
    """Return why a cache, or its keys or values, are not packed; ``None`` if they are."""
    if isinstance(cache, PackedKVCache):
        return cache.note
    text = f"{type(cache).__name__} is not packed"
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return text
    return f"{text}: {LATENTS}" if is_latent(keys.shape, values.shape) else text


def _layers(numbers: Sequence[int]) -> str:
    """Write layer numbers as runs: ``layers 0-4, 6``."""
    runs: list[list[int]] = []
    for n in dict.fromkeys(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(texts)}"
