"""Compare the decoded values of two files, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vkv.format.dependencies import FileResolver
from vkv.format.document import Document
from vkv.format.layers import stored_layers
from vkv.format.schema import Layer


@dataclass(frozen=True, slots=True)
class Distance:
    """Say how far the values of one tensor are from those of the same tensor in another file.

    Attributes:
        at: Path of the layer, e.g. ``layers[3]``.
        name: Name of the tensor, e.g. ``keys``.
        largest: Largest absolute difference of two values.
        error: Squared differences over the squares of the first file's values, both summed.
        power: Those squares, summed.
        shapes: Both shapes, where they cannot be compared; the numbers are 0 then.
    """

    at: str
    name: str
    largest: float = 0.0
    error: float = 0.0
    power: float = 0.0
    shapes: str = ""

    def __str__(self) -> str:
        """Return one line on a difference; nothing where there is none."""
        if self.shapes or not self.largest:
            return self.shapes
        return f"largest difference {self.largest:.4g}, relative squared error {self.error:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def distances(a: Document, b: Document, resolver: FileResolver | None) -> Iterator[Distance]:
    """Decode and compare every tensor that both files have; digests are checked on the way.

    Raises:
        VkvError: A tensor is damaged, or cannot be decoded.
    """
    from vkv.arrays.cache_file import CacheFile

    second = dict(stored_layers(b.header))
    with (
        CacheFile(a, resolver=resolver) as first_file,
        CacheFile(b, resolver=resolver) as second_file,
    ):
        for at, layer in stored_layers(a.header):
            if (other := second.get(at)) is None:
                continue
            for name in sorted(layer.tensors.keys() & other.tensors.keys()):
                yield _distance(((first_file, layer), (second_file, other)), name, at)


def total(found: list[Distance]) -> tuple[float, float]:
    """Return the largest difference of all tensors, and the relative squared error over all."""
    power = sum(d.power for d in found)
    error = sum(d.error * d.power for d in found) / power if power else 0.0
    return max((d.largest for d in found), default=0.0), error


def _distance(pair: tuple[tuple[Any, Layer], ...], name: str, at: str) -> Distance:
    """Compare one tensor of two files by value.

    Args:
        pair: Open file and layer, of each.
        name: ``"keys"``, for example.
        at: Path of the layer.
    """
    import mlx.core as mx

    from vkv.caches.loading.decode import decode

    x, y = (decode(file, layer, name, at).astype(mx.float32) for file, layer in pair)
    if x.shape != y.shape:
        rows = min(x.shape[-2], y.shape[-2]) if x.ndim == y.ndim == 4 else 0
        if not rows or (*x.shape[:-2], x.shape[-1]) != (*y.shape[:-2], y.shape[-1]):
            return Distance(at, name, shapes=f"{y.shape} for {x.shape}")
        x, y = x[..., :rows, :], y[..., :rows, :]
    power, square, largest = (
        float(v.item()) if x.size else 0.0  # type: ignore[arg-type]  # real, never complex
        for v in (mx.square(x).sum(), mx.square(x - y).sum(), mx.abs(x - y).max() if x.size else x)
    )
    return Distance(at, name, largest, square / max(power, 1e-30), power)
