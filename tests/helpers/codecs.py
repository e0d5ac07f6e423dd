"""Share what tests of several codecs need: settings, values, the reference decoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from tests.reference import file as reference
from vkv.codecs import registry
from vkv.codecs.protocol import DTYPES, NAMES, Codec, Parts
from vkv.format.dtypes import ITEMSIZE

#: Batch, heads and channels of the values below.
BATCH, HEADS, DIM = 2, 3, 64


@dataclass(frozen=True)
class Setting:
    """A codec string, and the tensor and dtype that it is configured for."""

    text: str
    tensor: str
    dtype: str = "F16"

    def __str__(self) -> str:
        return f"{self.text}-{self.tensor}-{self.dtype}"

    @property
    def codec(self) -> Codec:
        return registry.parse(self.text).configure(self.tensor, self.dtype)

    def values(self, tokens: int = 256, seed: int = 0, dim: int = DIM) -> mx.array:
        """Return as many of ``tokens`` tokens as the codec encodes behind the first position."""
        body = self.codec.span(tokens, 1)[1]
        return sample(body, seed, dim).astype(DTYPES[self.dtype])


def settings(dtype: str = "F16") -> list[Setting]:
    """Return examples of every codec, for keys and for values; of rates up to four."""
    return [
        Setting(text, tensor, dtype)
        for codec in registry.CODECS.values()
        for text in codec.examples[:: -(-len(codec.examples) // 4)]
        for tensor in ("keys", "values")
    ]


def sample(tokens: int, seed: int = 0, dim: int = DIM) -> mx.array:
    """Return ``(B, H, tokens, dim)`` that look like a cache: channels of many sizes, off centre."""
    rng = np.random.default_rng(seed)
    channels = np.random.default_rng(99)
    size = channels.lognormal(0, 0.5, (1, HEADS, 1, dim))
    mean = channels.normal(0, 1, (1, HEADS, 1, dim))
    x = rng.laplace(0, 1, (BATCH, HEADS, tokens, dim)) * size + mean
    return mx.array(x.astype(np.float32))


def numpy_parts(parts: Parts) -> dict[str, np.ndarray]:
    """Return parts as the reference decoder takes them, BF16 as float32."""
    wide = {n: p.astype(mx.float32) if p.dtype == mx.bfloat16 else p for n, p in parts.items()}
    return {name: np.array(part) for name, part in wide.items()}


def by_reference(codec: Codec, parts: Parts, shape: tuple[int, ...]) -> np.ndarray:
    """Decode with the decoder of ``tests/reference``, to float32."""
    params: dict[str, Any] = asdict(codec)  # type: ignore[call-overload]
    return reference.decoder(codec.id, codec.version)(numpy_parts(parts), params, shape)


def forms(parts: Parts) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each part, as a header names them."""
    return {name: (NAMES[part.dtype], part.shape) for name, part in parts.items()}


def same(a: Parts, b: Parts) -> bool:
    """Return whether two sets of parts have the same names, forms and bytes."""
    return forms(a) == forms(b) and all(raw_bytes(a[n]) == raw_bytes(b[n]) for n in a)


def raw_bytes(part: mx.array) -> bytes:
    """Return the bytes of an array, NaN and signed zeros as they are."""
    return np.array(part.view(mx.uint8) if part.size else part.astype(mx.uint8)).tobytes()


def damaged(part: mx.array, rng: np.random.Generator, edits: int) -> mx.array:
    """Return a copy with some bytes replaced."""
    data = bytearray(raw_bytes(part))
    for at in rng.integers(0, max(len(data), 1), edits if data else 0):
        data[at] = rng.integers(0, 256)
    flat = mx.array(np.frombuffer(bytes(data), np.uint8))
    return flat.view(part.dtype).reshape(part.shape) if data else part


def fixed_bytes(codec: Codec, shape: tuple[int, ...]) -> int:
    """Return the stored bytes of the parts whose size the shape alone fixes."""
    return sum(
        prod(n for n in dims if n is not None) * ITEMSIZE[dtype]
        for dtype, dims in codec.layout(shape).values()
        if None not in dims
    )
