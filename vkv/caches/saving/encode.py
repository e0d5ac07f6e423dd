"""Encode tensors as they were planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx

from vkv.caches.encoded import EncodedRun, encode, joined
from vkv.caches.saving.delta import ReferencedSegment
from vkv.caches.saving.tensor_plan import LayerPlan, TensorPlan
from vkv.codecs.protocol import NAMES, Parts
from vkv.codecs.raw import Raw
from vkv.errors import VkvError


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One tensor, ready to be written: its segments in order.

    Attributes:
        path: Prefix of the names of its stored tensors, ``layers.3.keys``.
        dtype: Logical dtype, as safetensors names it.
        shape: Logical shape.
        counts_tokens: Whether axis -2 counts tokens.
        segments: In other files, or encoded here.
        note: Why the codec that was asked for is not used.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    counts_tokens: bool
    segments: tuple[ReferencedSegment | EncodedRun, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedLayer:
    """One cache and its children, ready to be written."""

    kind: str
    scalars: dict[str, int]
    tensors: dict[str, EncodedTensor]
    children: tuple[EncodedLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedCheckpoint:
    """One checkpoint: tokens, and the encoded layers by path (``"3"``, ``"3.1"``)."""

    tokens: int
    layers: Mapping[str, EncodedLayer]
    message: bool


def encode_layer(plan: LayerPlan, max_segments: int) -> EncodedLayer:
    """Encode all tensors of a cache and of its children.

    Args:
        plan: How they are stored.
        max_segments: Carried-over segments a tensor may have before they are joined.

    Raises:
        VkvError: A codec refuses a tensor; the message starts with its path.
    """
    return EncodedLayer(
        plan.snapshot.kind,
        plan.snapshot.scalars,
        {name: encode_tensor(tensor, max_segments) for name, tensor in plan.tensors.items()},
        tuple(encode_layer(child, max_segments) for child in plan.children),
    )


def encode_tensor(plan: TensorPlan, max_segments: int) -> EncodedTensor:
    """Encode one tensor. Arguments and errors as ``encode_layer``."""
    runs = joined(plan.runs) if len(plan.runs) > max_segments else plan.runs
    value = plan.value
    return EncodedTensor(
        plan.path,
        NAMES[value.dtype],
        value.shape,
        value.tokens,
        (*plan.referenced, *runs, *_new_runs(plan)),
        plan.note,
    )


def _new_runs(plan: TensorPlan) -> Iterator[EncodedRun]:
    """Encode the rows of a plan: sinks, body, residual."""
    x = plan.rows
    if x is None:
        return
    raw = Raw(dtype=NAMES[x.dtype])
    if not plan.value.tokens:
        yield EncodedRun(plan.codec, plan.codec.encode(x), 0, plan.codec.roles)
        return
    stop = plan.lead + plan.body
    yield from _exact(raw, x[..., : plan.lead, :], "sink")
    if plan.body:
        parts = plan.parts if plan.parts is not None else _body(plan, x)
        yield EncodedRun(plan.codec, parts, plan.body, plan.codec.roles, plan.rope)
    yield from _exact(raw, x[..., stop:, :], "residual")


def _exact(raw: Raw, x: mx.array, role: str) -> Iterator[EncodedRun]:
    if x.shape[-2]:
        yield EncodedRun(raw, {"data": x}, x.shape[-2], {"data": role})


def _body(plan: TensorPlan, x: mx.array) -> Parts:
    x = x[..., plan.lead : plan.lead + plan.body, :]
    try:
        return encode(plan.codec, plan.unrotated(x, plan.start + plan.lead), plan.before)
    except VkvError as exc:
        raise exc.within(plan.path) from None
