"""Sum up the tensors of a file: one row for each name and codec. Needs no codecs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from vkv.format.layer_summary import codec_string
from vkv.format.layers import walk
from vkv.format.schema import Header, Layer, Scalar, Segment, Tensor

#: The option that says how many bits were asked for; 0 stands for none.
RATE = "bits"


@dataclass(slots=True)
class TensorKind:
    """Sum up the tensors of one name that one codec holds.

    Attributes:
        name: ``"keys"``, for example.
        codec: The codec of most of their tokens; ``raw`` only where there is no other.
        dtypes: Their dtypes.
        layers: How many layers, children included, have such a tensor.
        options: Option -> its values that are not the default, ascending.
        others: Other codec -> tokens of one tensor that it holds, the fewest and the most.
        notes: Reasons why the codec is not the one asked for.
    """

    name: str
    codec: str
    dtypes: set[str] = field(default_factory=set)
    layers: int = 0
    options: dict[str, set[Scalar]] = field(default_factory=dict)
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    @property
    def rate(self) -> str:
        """Return the codec and the bits asked for, such as ``tc 1.7``."""
        bits = self.options.get(RATE, set()) - {0}
        return f"{self.codec} {_range(bits)}" if bits else self.codec

    def __str__(self) -> str:
        """Return one line, such as ``tc 1.7, step 0.21 to 0.48, 30 layers``."""
        parts = [self.rate]
        parts += [f"{k} {_range(v)}" for k, v in sorted(self.options.items()) if k != RATE]
        parts.append(f"{self.layers} layer{'s' * (self.layers != 1)}")
        for codec, (low, high) in sorted(self.others.items()):
            parts.append(f"{_span(low, high)} token{'s' * (high != 1)} {codec}")
        return ", ".join(parts)

    def add(self, tensor: Tensor) -> None:
        """Count one more tensor."""
        self.layers += 1
        self.dtypes.add(tensor.dtype)
        self.notes |= {tensor.note} if tensor.note else set()
        for segment in tensor.segments:
            if segment.codec == self.codec:
                for name, value in _options(segment, self.name, tensor.dtype):
                    self.options.setdefault(name, set()).add(value)
        for codec, count in _tokens(tensor).items():
            if codec != self.codec:
                low, high = self.others.get(codec, (count, count))
                self.others[codec] = min(low, count), max(high, count)


def tensor_kinds(header: Header) -> list[TensorKind]:
    """Return one row for each tensor name and codec of the layers, checkpoints left out."""
    kinds: dict[tuple[str, str], TensorKind] = {}
    for _, layer in walk(header.layers):
        for name, tensor in layer.tensors.items():
            counts = _tokens(tensor)
            codec = max(counts, key=lambda c: (c != "raw", counts[c]), default="raw")
            kinds.setdefault((name, codec), TensorKind(name, codec)).add(tensor)
    return [kinds[key] for key in sorted(kinds)]


def layer_kinds(header: Header) -> str:
    """Return how many layers of each kind there are: ``24 rotating (max_size 4,096), 6 kv``."""
    counts: dict[str, list[Layer]] = {}
    for layer in header.layers:
        counts.setdefault(layer.kind, []).append(layer)
    return ", ".join(f"{len(own):,} {kind}{_sizes(own)}" for kind, own in counts.items())


def default_options(codec: str, version: int, tensor: str, dtype: str) -> dict[str, Scalar]:
    """Return the options that a codec has by default; none for one that this build lacks."""
    by_tensor = _defaults().get(f"{codec}@{version}", {})
    by_dtype = by_tensor.get(tensor) or by_tensor.get("values") or {}
    found: dict[str, Scalar] = by_dtype.get(dtype, {})
    return found


@cache
def _defaults() -> dict[str, Any]:
    """Read the table that ``python -m spec`` writes from the codecs."""
    text = (files("vkv.format") / "option_defaults.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _options(segment: Segment, tensor: str, dtype: str) -> Iterator[tuple[str, Scalar]]:
    """Yield the options that differ from the default; the rate in any case."""
    if codec_string(segment) == segment.codec:
        return
    usual = default_options(segment.codec, segment.version, tensor, dtype)
    for name, value in segment.params.items():
        if name == RATE or usual.get(name) != value:
            yield name, value


def _tokens(tensor: Tensor) -> dict[str, int]:
    """Return how many tokens each codec holds of a tensor; 0 where it has no such axis."""
    counts: dict[str, int] = {}
    for s in tensor.segments:
        whole = tensor.shape[-2] if len(tensor.shape) == 4 else 0
        counts[s.codec] = counts.get(s.codec, 0) + (s.tokens or whole)
    return counts


def _sizes(layers: list[Layer]) -> str:
    """Return the window of layers that have one."""
    for name in ("max_size", "chunk_size"):
        if values := {x.scalars[name] for x in layers if name in x.scalars}:
            return f" ({name} {_range(set(values))})"
    return ""


def _range(values: set[Any]) -> str:
    """Return ``0.21 to 0.48`` for numbers, ``a or b`` for other values."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numbers and len(values) > 1:
        return _span(min(values), max(values))
    return " or ".join(sorted(_text(v) for v in values))


def _span(low: float, high: float) -> str:
    a, b = _text(low), _text(high)
    return a if a == b else f"{a} to {b}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1e5):
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
