"""Remember which stored layer a cache was loaded from, so that saving it again loses nothing.

A cache decoded from lossy codes and then saved would be quantized twice. A loaded
cache therefore carries a ``Provenance``: when it is saved, each leading segment whose
decoded values are still in the cache, bit for bit, is copied as it is, and only what
follows is encoded. Where a cache was cut inside a segment, the codes in front of the
cut are kept as far as the codec can cut: at a window, for a codec that has windows.
"""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile
from vkv.caches.encoded import EncodedRun
from vkv.caches.loading.decode import decode_segment
from vkv.codecs import registry
from vkv.codecs.protocol import NAMES
from vkv.format.layers import segment_shape
from vkv.format.schema import Layer, Segment, Tensor

_ATTRIBUTE = "vkv_provenance"


class Provenance:
    """One layer of an open file. Copies of a cache share it."""

    def __init__(self, file: CacheFile, layer: Layer, at: str):
        self.file, self.layer, self.at = file, layer, at

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def runs(self, name: str, x: mx.array, first: int = 0) -> list[EncodedRun]:
        """Return the segments of a tensor, from row ``first`` on, that still decode to ``x``.

        Lossless segments but sinks before codes are left out: nothing is lost by encoding
        them anew.

        Args:
            name: ``"keys"`` or ``"values"``.
            x: The live tensor, ``(B, H, T, D)``.
            first: Row at which a segment must start; rows before it are stored otherwise.
        """
        tensor = self.layer.tensors.get(name)
        if tensor is None or not _same_form(tensor, x):
            return []
        runs: list[EncodedRun] = []
        start = 0
        for i, segment in enumerate(tensor.segments):
            tokens = segment.tokens or tensor.shape[-2]
            if start >= first:
                run = self._matching(name, tensor, i, x, start)
                runs += [] if run is None else [run]
                if run is None or run.tokens < tokens or start + tokens == x.shape[-2]:
                    break
            start += tokens
            if start > first and not runs:
                break  # no segment starts at ``first``
        while runs and runs[-1].codec.traits.lossless:
            runs.pop()
        return runs

    def _matching(
        self, name: str, tensor: Tensor, index: int, x: mx.array, start: int
    ) -> EncodedRun | None:
        """Return segment ``index``, or as much of its front as is in ``x`` from ``start`` on."""
        segment = tensor.segments[index]
        roles = self._roles(segment)
        if registry.is_lossless(segment) and "sink" not in roles.values():
            return None
        if segment.tokens is None:
            return None
        decoded = decode_segment(self.file, self.layer, name, index, start, self.at)
        tokens = min(segment.tokens, x.shape[-2] - start)
        tokens = _equal_tokens(decoded[..., :tokens, :], x[..., start : start + tokens, :])
        codec, parts = self.file.parts(segment, segment_shape(tensor, segment))
        rope = None if segment.rope is None else self.file.header.ropes[segment.rope]
        whole = EncodedRun(codec, parts, segment.tokens, roles, rope)
        return whole.prefix(tensor.shape, tokens)

    def _roles(self, segment: Segment) -> dict[str, str]:
        """Return the role of each part, as the file has it."""
        stored = self.file.header.tensors
        return {part: stored[name].role for part, name in segment.parts.items()}


def attach(cache: Any, provenance: Provenance) -> None:
    """Remember where ``cache`` came from."""
    setattr(cache, _ATTRIBUTE, provenance)


def of(cache: Any) -> Provenance | None:
    """Return where ``cache`` came from, if it was loaded."""
    known = getattr(cache, _ATTRIBUTE, None)
    return known if isinstance(known, Provenance) else None


def _same_form(tensor: Tensor, x: mx.array) -> bool:
    return (
        x.ndim == len(tensor.shape)
        and NAMES.get(x.dtype) == tensor.dtype
        and (*x.shape[:-2], x.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
    )


def _equal_tokens(a: mx.array, b: mx.array) -> int:
    """Count the leading tokens of ``a`` and ``b`` that are equal in every head and channel."""
    if a.shape[-2] == 0:
        return 0
    same = (a == b) | ((a != a) & (b != b))
    axes = tuple(i for i in range(a.ndim) if i != a.ndim - 2)
    first = mx.cumprod(same.all(axis=axes).astype(mx.int32))
    return int(first.sum().item())  # type: ignore[arg-type]  # never complex
