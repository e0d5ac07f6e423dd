"""Measure what an error in a cache costs its model, by gradients of its log-probabilities.

For tokens ``y`` drawn from the model itself, the mean of ``g g^T`` over gradients ``g``
of ``log p(y)`` by one tensor's tokens is the Fisher information ``F`` of that tensor:
errors of covariance ``E`` in it move the next-token distribution by a KL of
``tr(F E) / 2``, for small errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.kinds.live import make

Arrays = dict[str, mx.array]


def gradients(
    model: Any,
    snapshots: Sequence[Snapshot],
    paths: Sequence[str],
    tokens: Sequence[int],
    seed: int,
) -> Arrays:
    """Return the gradients of the log-probabilities of drawn successors of ``tokens``.

    Args:
        model: An mlx-lm model.
        snapshots: The cache before ``tokens``; left as it is.
        paths: Tensors wanted, ``layers.3.keys``; a child's is ``layers.3.0.keys``.
        tokens: Read after the cache.
        seed: Of the draws.

    Returns:
        By path, as the cache holds the tensor, ``(B, H, T, D)``.

    Raises:
        ValueError, RuntimeError: The model has an operation without a gradient.
    """
    ids, key = mx.array([list(tokens)]), mx.random.key(seed)
    arrays = {path: x for i, s in enumerate(snapshots) for path, x in _arrays(s, f"layers.{i}")}

    def drawn(tensors: Arrays) -> mx.array:
        cache = [_made(s, f"layers.{i}", tensors) for i, s in enumerate(snapshots)]
        logits = model(ids, cache=cache)[0].astype(mx.float32)
        y = mx.random.categorical(mx.stop_gradient(logits), key=key)
        scores = mx.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
        return (scores - mx.logsumexp(logits, axis=-1)).sum()

    by_path: Arrays = mx.grad(drawn)({path: arrays[path] for path in paths})
    mx.eval(by_path)
    return by_path


def _arrays(snapshot: Snapshot, path: str) -> list[tuple[str, mx.array]]:
    """List every array of a cache and its children, by path."""
    arrays = [(f"{path}.{name}", v.x) for name, v in snapshot.values.items() if v.x is not None]
    for i, child in enumerate(snapshot.children):
        arrays += _arrays(child, f"{path}.{i}")
    return arrays


def _made(snapshot: Snapshot, path: str, tensors: Mapping[str, mx.array]) -> Any:
    """Make the cache again, with some of its arrays replaced."""
    loaded: dict[str, Any] = {
        name: tensors.get(f"{path}.{name}", value.x) for name, value in snapshot.values.items()
    }
    if snapshot.children:
        loaded["children"] = [
            _made(child, f"{path}.{i}", tensors) for i, child in enumerate(snapshot.children)
        ]
    return make(snapshot.kind, snapshot.scalars, loaded)
