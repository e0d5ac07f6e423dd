"""Where a loaded cache came from, so that saving it again loses nothing.

A cache decoded from lossy codes and then saved would be quantized twice. A
loaded cache therefore carries an ``Origin``: when it is saved, each leading
segment whose decoded values still stand in the cache, bit for bit, is copied
as it is, and only what follows is encoded.
"""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile
from vkv.caches.encoded import Kept
from vkv.caches.loading.decode import decode_segment
from vkv.codecs import registry
from vkv.codecs.protocol import NAMES
from vkv.format.layers import segment_shape
from vkv.format.schema import Layer, Segment, Tensor

_ATTRIBUTE = "vkv_origin"


class Origin:
    """One layer of an open file. Copies of a cache share it."""

    def __init__(self, file: CacheFile, layer: Layer, at: str):
        self.file, self.layer, self.at = file, layer, at

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def kept(self, name: str, x: mx.array) -> list[Kept]:
        """Leading segments of tensor ``name`` whose values still stand in ``x``.

        Raw segments but sinks are left out: nothing is lost by encoding them anew.

        Args:
            name: ``"keys"`` or ``"values"``.
            x: The live tensor, ``(B, H, T, D)``.
        """
        tensor = self.layer.tensors.get(name)
        if tensor is None or not _same_form(tensor, x):
            return []
        kept: list[Kept] = []
        start = 0
        for i, segment in enumerate(tensor.segments):
            if registry.is_lossless(segment) and "sink" not in self.roles(segment).values():
                break
            found = self._match(name, tensor, i, x, start)
            if found is None:
                break
            kept.append(found)
            start += found.tokens
            if found.tokens < (segment.tokens or 0) or start == x.shape[-2]:
                break
        return kept

    def _match(self, name: str, tensor: Tensor, index: int, x: mx.array, start: int) -> Kept | None:
        """Segment ``index``, or its longest prefix that stands in ``x`` from ``start`` on."""
        segment = tensor.segments[index]
        if segment.tokens is None:
            return None
        decoded = decode_segment(self.file, self.layer, name, index, start, self.at)
        tokens = min(segment.tokens, x.shape[-2] - start)
        tokens = _equal_tokens(decoded[..., :tokens, :], x[..., start : start + tokens, :])
        codec, parts = self.file.parts(segment, segment_shape(tensor, segment))
        rope = None if segment.rope is None else self.file.header.ropes[segment.rope]
        whole = Kept(codec, parts, segment.tokens, self.roles(segment), rope)
        return whole.prefix(tensor.shape, tokens)

    def roles(self, segment: Segment) -> dict[str, str]:
        """Role of each part, as the file has it."""
        stored = self.file.header.tensors
        return {part: stored[name].role for part, name in segment.parts.items()}


def attach(cache: Any, origin: Origin) -> None:
    """Remember where ``cache`` came from."""
    setattr(cache, _ATTRIBUTE, origin)


def of(cache: Any) -> Origin | None:
    """Where ``cache`` came from, if it was loaded."""
    found = getattr(cache, _ATTRIBUTE, None)
    return found if isinstance(found, Origin) else None


def _same_form(tensor: Tensor, x: mx.array) -> bool:
    return (
        x.ndim == len(tensor.shape)
        and NAMES.get(x.dtype) == tensor.dtype
        and (*x.shape[:-2], x.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
    )


def _equal_tokens(a: mx.array, b: mx.array) -> int:
    """How many leading tokens of ``a`` and ``b`` are equal in every head and channel."""
    if a.shape[-2] == 0:
        return 0
    same = (a == b) | ((a != a) & (b != b))
    axes = tuple(i for i in range(a.ndim) if i != a.ndim - 2)
    first = mx.cumprod(same.all(axis=axes).astype(mx.int32))
    return int(first.sum().item())  # type: ignore[arg-type]  # never complex
