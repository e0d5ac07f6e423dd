"""Encode the checkpoints of a save, as its layers are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vkv.caches.checkpoints.record import Checkpoint
from vkv.caches.saving.encode import EncodedCheckpoint, EncodedLayer, encode_layer
from vkv.caches.saving.request import SaveRequest, codec_pair
from vkv.caches.saving.tensor_plan import plan_layer


def encoded_checkpoints(
    request: SaveRequest, checkpoints: Iterable[Checkpoint]
) -> Iterator[EncodedCheckpoint]:
    """Yield checkpoints in encoded form, by the codecs of the save.

    A codec that plans for a whole cache (``tc``) has no plan for a part of it; there
    checkpoints are stored raw. No row of a parent file is referred to.
    """
    request = replace(request, parent=None, basis=None)
    if any(asked.codec.traits.plans for asked in request.codecs.both()):
        request = replace(request, codecs=codec_pair("raw"))
    for i, checkpoint in enumerate(checkpoints):
        layers: dict[str, EncodedLayer] = {}
        for place, taken in checkpoint.layers.items():
            path = ".".join(map(str, place))
            plan = plan_layer(request, taken, f"checkpoints.{i}.{path}", place[0])
            layers[path] = encode_layer(plan, request.max_segments)
        yield EncodedCheckpoint(checkpoint.tokens, layers, checkpoint.message)
