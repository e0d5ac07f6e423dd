"""Plan over all tensors of a cache, for codecs that share bits among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

import mlx.core as mx

from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.kinds.live import visible
from vkv.caches.saving.request import SaveRequest
from vkv.caches.saving.tensor_plan import LayerPlan, TensorPlan, plan_layer
from vkv.codecs.protocol import NAMES, Piece
from vkv.errors import VkvError

#: Bytes that a segment takes in the header and the table before it, and sinks in front of it.
SEGMENT, SINKS = 900, 350


def plan_layers(
    request: SaveRequest, snapshots: Iterable[Snapshot], fixed: int = 0
) -> Iterator[LayerPlan]:
    """Plan all caches of a file.

    One after the other, so that those not yet asked for need not be in memory; but for
    a codec that plans over all tensors, all of them at once.

    Args:
        request: What was asked of the save.
        snapshots: One per layer of the model.
        fixed: Bytes of the file that are no layer's.

    Raises:
        VkvError: Such a codec refuses a tensor; the message starts with its path.
    """
    seen = enumerate(map(visible, snapshots))
    plans = (plan_layer(request, taken, f"layers.{i}", i) for i, taken in seen)
    if any(asked.codec.traits.plans for asked in request.codecs.both()):
        return iter(_allocated(request, list(plans), fixed))
    return plans


def _allocated(request: SaveRequest, layers: list[LayerPlan], fixed: int) -> list[LayerPlan]:
    """Give each tensor a codec of its own, where the one asked for plans over all tensors.

    Keys and values are planned together if one codec is for both. Only the rows behind
    codes that are kept take part, and of the bytes that all tensors share their share.
    """
    flat = [layer for top in layers for layer in top.walk()]
    tensors = [(place, t) for place, layer in enumerate(flat) for t in layer.tensors.values()]
    elements = sum(prod(t.value.shape) for _, t in tensors)
    pieces = [(t, piece) for place, t in tensors if (piece := _piece(request, t, place))]
    asked = list(dict.fromkeys(t.asked.text for t, _ in pieces))
    pieces.sort(key=lambda pair: asked.index(pair[0].asked.text))
    new: dict[str, TensorPlan] = {}
    for _, same in groupby(pieces, key=lambda pair: pair[0].asked.text):
        group = list(same)
        own = sum(piece.x.size for _, piece in group)
        described = sum(SEGMENT + SINKS * (piece.start == 0) for _, piece in group)
        new |= _planned(request, group, round(fixed * own / elements) + described)
    return [_replaced(layer, new) for layer in layers]


def _planned(
    request: SaveRequest, group: Sequence[tuple[TensorPlan, Piece]], overhead: int
) -> dict[str, TensorPlan]:
    codec = group[0][0].asked.configure("keys", NAMES[group[0][0].value.dtype])
    try:
        planned = codec.plan([piece for _, piece in group], overhead, force=request.force)
    except VkvError as exc:
        at = next((t.path for t, piece in group if not mx.isfinite(piece.x).all()), None)
        raise (exc.within(at) if at else exc) from None
    return {t.path: t.with_planned(one) for (t, _), one in zip(group, planned, strict=True)}


def _piece(request: SaveRequest, plan: TensorPlan, place: int) -> Piece | None:
    """Return the rows that are to be encoded, if they are planned for."""
    if plan.rows is None or not plan.codec.traits.plans or not plan.body:
        return None
    x = plan.unrotated(plan.rows, plan.start).astype(plan.rows.dtype)
    sinks = x[..., : plan.lead, :]
    if not mx.isfinite(sinks).all():  # they are stored raw: what they hold must not matter
        x = mx.concatenate([mx.zeros_like(sinks), x[..., plan.lead :, :]], axis=-2)
    table = None if request.basis is None else request.basis.table(plan.path)
    return Piece(place, plan.name != "values", x, plan.start, table)


def _replaced(layer: LayerPlan, new: dict[str, TensorPlan]) -> LayerPlan:
    tensors = {name: new.get(t.path, t) for name, t in layer.tensors.items()}
    children = tuple(_replaced(child, new) for child in layer.children)
    return replace(layer, tensors=tensors, children=children)
