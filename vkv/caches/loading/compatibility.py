"""Compare the caches of a file with those that a live model makes and fills.

An identity says which weights filled a cache, and a file may claim any. What the
model itself makes of one token shows kinds, fixed numbers, heads and widths, without
computing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from vkv.caches.kinds.live import ADAPTERS, kind_of
from vkv.format.kinds import KINDS
from vkv.format.layers import walk
from vkv.format.schema import Header, Layer

NAMES = ("keys", "values")
#: Sentences.
MOST = 4


def differences(head: Header, model: Any) -> list[str]:
    """Return what differs between the layers of a file and the caches of ``model``."""
    caches = _filled(model)
    if len(head.layers) != len(caches):
        return [f"{len(head.layers)} caches in the file, the model takes {len(caches)}"]
    tokens = head.tokens is not None and head.tokens.count > 0
    filled = tokens or any(layer.scalars.get("offset") for _, layer in walk(head.layers))
    alike: dict[str, list[str]] = {}
    for at, text in _compare(head.layers, caches, filled):
        alike.setdefault(text, []).append(at)
    return [
        f"layer {first}{f' and {len(more)} more' * bool(more)}: {text}"
        for text, (first, *more) in list(alike.items())[:MOST]
    ]


def _filled(model: Any) -> list[Any]:
    """Return caches as the model makes them, one token in each that it fills, not computed."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception:  # a model that takes more than tokens; its caches stay empty
        return list(make_prompt_cache(model))
    return caches


def _compare(
    layers: Sequence[Layer], caches: Sequence[Any], filled: bool, at: str = ""
) -> Iterator[tuple[str, str]]:
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        kind = kind_of(cache)
        if kind is None:
            continue
        if kind.name not in (layer.kind, *KINDS[layer.kind].stands_for):
            yield f"{at}{i}", _both(f"kind {layer.kind}", kind.name)
            continue
        children = ADAPTERS[kind.name].children(cache)
        if len(layer.children) != len(children):
            yield f"{at}{i}", _both(f"{len(layer.children)} caches", str(len(children)))
        elif text := _constants(layer, cache) or _rows(layer, cache, filled):
            yield f"{at}{i}", text
        else:
            yield from _compare(layer.children, children, filled, f"{at}{i}.")


def _constants(layer: Layer, cache: Any) -> str | None:
    """Compare the numbers that the model fixes: the size of a ring, of a chunk."""
    kind = kind_of(cache)
    if kind is None or kind.name != layer.kind:
        return None
    live = ADAPTERS[kind.name].scalars(cache)
    for name in kind.constants:
        if layer.scalars[name] != live[name]:
            return _both(f"{name} {layer.scalars[name]}", str(live[name]))
    return None


def _both(stored: str, live: str) -> str:
    return f"{stored} in the file, {live} in the model"


def _rows(layer: Layer, cache: Any, filled: bool) -> str | None:
    """Compare heads and widths of keys and values, where the model has filled some."""
    want = [getattr(cache, name, None) for name in NAMES]
    shapes = [x.shape for x in want if isinstance(x, mx.array) and x.ndim == 4]
    have = [layer.tensors[name].shape for name in NAMES if name in layer.tensors]
    if len(shapes) != len(NAMES) or not layer.tensors:
        empty = filled and len(shapes) == len(NAMES)
        return _both("nothing", "something") if empty else None
    if any(len(shape) != 4 for shape in have) or len(have) != len(NAMES):
        return None  # L4 says more
    texts = [f"{x[1]} KV heads of {x[3]} and {y[3]} channels" for x, y in (have, shapes)]
    return None if texts[0] == texts[1] else _both(*texts)
