"""Summarize layers for people: runs of equal layers, codec strings. Needs no codecs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vkv.format.schema import Layer, Segment, Tensor


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Describe consecutive layers that are alike.

    Attributes:
        layers: Their indices, ``3`` or ``3-7``; children of a list as ``3.0``.
        kind: Their kind.
        scalars: Their scalars.
        tensors: Tensor name -> dtype, shape and codecs, as ``describe`` gives them.
        notes: Tensor name -> reason why its codec is not the one asked for.
    """

    layers: str
    kind: str
    scalars: dict[str, int]
    tensors: dict[str, str]
    notes: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "kind": self.kind,
            "scalars": self.scalars,
            "tensors": self.tensors,
            "notes": self.notes,
        }


def layer_groups(layers: tuple[Layer, ...], prefix: str = "") -> list[LayerGroup]:
    """Group runs of equal layers; the children of a list follow their parent."""
    groups: list[LayerGroup] = []
    first = 0
    for i, layer in enumerate(layers):
        if i + 1 < len(layers) and _look(layers[i + 1]) == _look(layer):
            continue
        name = f"{prefix}{first}" if first == i else f"{prefix}{first}-{i}"
        groups.append(_group(name, layer))
        groups += layer_groups(layer.children, f"{name}.")
        first = i + 1
    return groups


def _group(name: str, layer: Layer) -> LayerGroup:
    tensors = {n: describe(t) for n, t in sorted(layer.tensors.items())}
    notes = {n: t.note for n, t in sorted(layer.tensors.items()) if t.note}
    return LayerGroup(name, layer.kind, layer.scalars, tensors, notes)


def _look(layer: Layer) -> tuple[Any, ...]:
    return _group("", layer), tuple(_look(child) for child in layer.children)


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and codecs of a tensor as one line.

    For example ``BF16 (1, 8, 4096, 128): raw 4 + affine:bits=4,group=64,scale=BF16 4092 in 3
    segments``: the first 4 tokens raw, the next 4,092 in three ``affine`` segments.
    """
    shape = ", ".join(map(str, tensor.shape))
    runs = [(codec, list(run)) for codec, run in groupby(tensor.segments, key=codec_string)]
    pieces = []
    for codec, run in runs:
        count = f" {sum(s.tokens or 0 for s in run)}" if len(runs) > 1 else ""
        pieces.append(f"{codec}{count}" + (f" in {len(run)} segments" if len(run) > 1 else ""))
    return f"{tensor.dtype} ({shape}): {' + '.join(pieces)}"


def codec_string(segment: Segment) -> str:
    """Return the codec string of a segment, e.g. ``affine:bits=4,group=64,scale=F16``.

    ``raw`` has no options in it: its one parameter is the dtype of the tensor.
    """
    if segment.is_raw or not segment.params:
        return segment.codec
    return f"{segment.codec}:" + ",".join(f"{k}={v}" for k, v in sorted(segment.params.items()))
