"""Codecs that look at the whole cache before they encode its first tensor."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.saving.tensor_plan import LayerDraft, TensorDraft, draft
from vkv.caches.saving.write_plan import Plan
from vkv.codecs.protocol import NAMES, Piece
from vkv.codecs.registry import Choice

#: Bytes that a segment takes in the header and the table before it, and sinks in front of it.
SEGMENT, SINKS = 900, 350


def add_layers(plan: Plan, snapshots: Iterable[Snapshot], fixed: int = 0) -> None:
    """Plan all caches of a file and encode them.

    One after the other, so that those not yet asked for need not be in memory; but
    for a codec that plans, all of them at once.

    Args:
        plan: Receives layers and tensors.
        snapshots: One per layer of the model.
        fixed: Bytes of the file that are no layer's.
    """
    drafts: Iterable[LayerDraft] = (
        draft(plan, snapshot, f"layers.{i}", i) for i, snapshot in enumerate(snapshots)
    )
    if any(c.codec.traits.plans for c in (plan.wish.keys, plan.wish.values)):
        drafts = list(drafts)
        allocate(drafts, fixed)
    for layer in drafts:
        plan.layers.append(layer.build())


def allocate(layers: Iterable[LayerDraft], fixed: int) -> None:
    """Give each tensor its own codec, and encode it, where the one asked for plans.

    Keys and values are planned together if one choice is for both. Only the tokens
    behind codes that are kept take part, and of the bytes that all tensors share
    their share.
    """
    flat = [layer for top in layers for layer in top.walk()]
    elements = sum(prod(t.value.shape) for layer in flat for t in layer.tensors.values())
    groups: list[tuple[Choice, list[tuple[TensorDraft, Piece]]]] = []
    for place, layer in enumerate(flat):
        for tensor in layer.tensors.values():
            piece = _piece(tensor, place)
            if piece is None:
                continue
            found = next((g for choice, g in groups if choice == tensor.choice), None)
            if found is None:
                groups.append((tensor.choice, found := []))
            found.append((tensor, piece))
    for choice, group in groups:
        own = sum(piece.x.size for _, piece in group)
        described = sum(SEGMENT + SINKS * (piece.start == 0) for _, piece in group)
        _plan(choice, group, round(fixed * own / elements) + described)


def _plan(choice: Choice, group: list[tuple[TensorDraft, Piece]], overhead: int) -> None:
    codec = choice.configure("keys", NAMES[group[0][0].value.dtype])
    planned = codec.plan([piece for _, piece in group], overhead)
    for (tensor, _), one in zip(group, planned, strict=True):
        tensor.take(one)


def _piece(tensor: TensorDraft, place: int) -> Piece | None:
    """The rows that are to be encoded, if a plan is to be made for them."""
    x, codec, keys = tensor.x, tensor.codec, tensor.name != "values"
    if x is None or not codec.traits.plans:
        return None
    if not codec.span(x.shape[-2], tensor.start)[1]:
        return None
    if codec.pre_rope:
        x = tensor.unrotated(x, tensor.start)[0].astype(x.dtype)
    return Piece(place, keys, x, tensor.start, tensor.plan.table(tensor.path))
