"""Walk the layers and segments of a header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vkv.format import file_id
from vkv.format.file_id import FileId
from vkv.format.schema import Header, Layer, Segment, Tensor

#: Why MLA latents are neither saved nor held with loss.
LATENTS = "MLA latents: an error in one reaches every head"


def is_latent(keys: tuple[int, ...], values: tuple[int, ...]) -> bool:
    """Return whether tensors of these shapes are MLA's: one "head" for all, of two widths."""
    return len(keys) == len(values) == 4 and keys[1] == 1 and keys[3] != values[3]


def walk(layers: tuple[Layer, ...], at: str = "layers") -> list[tuple[str, Layer]]:
    """List every layer and child, in order, with its path, e.g. ``layers[3].children[0]``."""
    found: list[tuple[str, Layer]] = []
    for i, layer in enumerate(layers):
        path = f"{at}[{i}]"
        found.append((path, layer))
        found += walk(layer.children, f"{path}.children")
    return found


def stored_layers(header: Header) -> list[tuple[str, Layer]]:
    """Return every layer, child, and layer of a checkpoint, with its path, in file order."""
    return walk(header.layers) + [
        (f"checkpoints[{i}].{path}", layer)
        for i, checkpoint in enumerate(header.checkpoints)
        for path, layer in sorted(checkpoint.layers.items(), key=lambda item: place(item[0]))
    ]


def place(path: str) -> tuple[int, ...]:
    """Return the place that the path of a checkpoint's layer names: ``"3.1"`` is ``(3, 1)``.

    Returns:
        The numbers; none for a text that is no path.
    """
    parts = path.split(".")
    plain = all(p.isascii() and p.isdecimal() and len(p) < 6 for p in parts)
    return tuple(map(int, parts)) if plain and ".".join(str(int(p)) for p in parts) == path else ()


def leaf_layers(layers: Iterable[Layer], at: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield every layer without children, with the path that a checkpoint names it by."""
    for i, layer in enumerate(layers):
        if layer.children:
            yield from leaf_layers(layer.children, f"{at}{i}.")
        else:
            yield f"{at}{i}", layer


def layer_at(layers: tuple[Layer, ...], path: tuple[int, ...]) -> Layer | None:
    """Return the layer, or child, at a place; ``None`` if there is none."""
    layer = None
    for i in path:
        if i >= len(layers):
            return None
        layer = layers[i]
        layers = layer.children
    return layer


def segments(header: Header) -> list[tuple[str, str, Tensor, Segment]]:
    """List every segment as ``(path, tensor name, tensor, segment)``, in file order."""
    return [
        (f"{path}.{name}.segments[{i}]", name, tensor, segment)
        for path, layer in stored_layers(header)
        for name, tensor in sorted(layer.tensors.items())
        for i, segment in enumerate(tensor.segments)
    ]


def segment_shape(tensor: Tensor, segment: Segment) -> tuple[int, ...]:
    """Return the shape of the part of ``tensor`` that ``segment`` covers."""
    if segment.tokens is None:
        return tensor.shape
    return (*tensor.shape[:-2], segment.tokens, tensor.shape[-1])


def external_references(header: Header) -> dict[FileId, list[str]]:
    """Return the files that ``header`` depends on: id -> names of the tensors there."""
    names: dict[FileId, list[str]] = {}
    for name, stored in header.tensors.items():
        if stored.file is not None:
            names.setdefault(file_id.from_bytes(stored.file), []).append(name)
    return names
