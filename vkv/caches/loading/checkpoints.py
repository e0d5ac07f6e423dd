"""Bring back the checkpoints of a file with its caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile
from vkv.arrays.deferred import DeferredVerification
from vkv.caches.checkpoints.record import Checkpoint, CheckpointedCache
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.caches.loading.decode import decode
from vkv.caches.provenance import Provenance, loaded_file
from vkv.format.layers import place
from vkv.format.schema import Layer
from vkv.identity.tokens import of_tokens

Finished = Callable[[Layer], object]


def _ignore(layer: Layer) -> None:
    """Do nothing: nobody asked for the progress."""


def with_checkpoints(
    caches: list[Any],
    file: CacheFile,
    deferred: DeferredVerification | None = None,
    finished: Finished = _ignore,
) -> list[Any]:
    """Return the caches with the checkpoints of their file; a plain list if it has none.

    Args:
        finished: Called with each layer of a checkpoint when it is decoded.
    """
    if not file.header.checkpoints:
        return caches
    return CheckpointedCache(caches, stored_checkpoints(file, deferred, finished))


def stored_checkpoints(
    file: CacheFile,
    deferred: DeferredVerification | None = None,
    finished: Finished = _ignore,
) -> list[Checkpoint]:
    """Decode all checkpoints of an open file.

    Raises:
        VkvError: A tensor is damaged, or its codec is unknown.
    """
    ids = file.document.tokens()
    return [
        Checkpoint(
            stored.tokens,
            {
                place(path): _snapshot(file, layer, f"checkpoints[{i}].{path}", deferred, finished)
                for path, layer in stored.layers.items()
            },
            stored.message,
            None if ids is None else of_tokens(ids[: stored.tokens]),
        )
        for i, stored in enumerate(file.header.checkpoints)
    ]


def _snapshot(
    file: CacheFile,
    layer: Layer,
    at: str,
    deferred: DeferredVerification | None,
    finished: Finished,
) -> Snapshot:
    values = {}
    for name, tensor in layer.tensors.items():
        x = decode(file, layer, name, at, deferred)
        counts = any(segment.tokens is not None for segment in tensor.segments)
        values[name] = Value(x.shape, x.dtype, x, tokens=counts)
    mx.eval([value.x for value in values.values()])
    finished(layer)
    known = loaded_file(file)
    source = None if known is None else Provenance(known, at)
    return Snapshot(layer.kind, dict(layer.scalars), values, provenance=source)
