"""Bring encoded layers into the form of a file: stored tensors, external references, layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import mlx.core as mx
from msgspec import structs

from vkv.arrays.host_bytes import copied, stored
from vkv.caches.encoded import EncodedRun
from vkv.caches.saving.delta import ReferencedSegment
from vkv.caches.saving.encode import EncodedCheckpoint, EncodedLayer, EncodedTensor
from vkv.caches.saving.request import SaveRequest
from vkv.codecs.protocol import NAMES
from vkv.format import container_write
from vkv.format.dtypes import ITEMSIZE
from vkv.format.schema import Checkpoint, Layer, Rope, Segment, Stored, Tensor
from vkv.sources import base


@dataclass(frozen=True, slots=True)
class Pending:
    """One tensor to be stored; ``load`` returns its bytes and is called once."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], base.Buffer | container_write.Pieces]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class FileContents:
    """All that a file holds, in file order.

    Attributes:
        layers: As the header describes them.
        checkpoints: Likewise.
        ropes: That segments and the model refer to.
        tensors: To be stored, by name.
        external: Tensors of other files, by the name they have in this one.
        tables: Names under which tables are offered to other files.
    """

    layers: tuple[Layer, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    ropes: tuple[Rope, ...] = ()
    tensors: Mapping[str, Pending] = dataclasses.field(default_factory=dict)
    external: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> tuple[str, ...]:
        """Name the features that a reader must know."""
        inner = (layer for checkpoint in self.checkpoints for layer in checkpoint.layers.values())
        rotated = any(map(_rotated, (*self.layers, *inner)))
        used = {
            "checkpoints": bool(self.checkpoints),
            "files": bool(self.external),
            "rope": rotated,
        }
        return tuple(name for name, needed in used.items() if needed)


def _rotated(layer: Layer) -> bool:
    own = (s.rope is not None for tensor in layer.tensors.values() for s in tensor.segments)
    return any(own) or any(map(_rotated, layer.children))


def file_contents(
    request: SaveRequest,
    layers: Iterable[EncodedLayer],
    tables: Mapping[str, mx.array] | None = None,
    checkpoints: Iterable[EncodedCheckpoint] = (),
) -> FileContents:
    """Name and number all that ``layers`` hold.

    Args:
        request: What was asked of the save: ropes of the model, tables that other files hold.
        layers: One after the other, so that each is encoded when the one before it is done.
        tables: To be offered to other files, by name.
        checkpoints: Behind the layers.
    """
    names = _Names(request)
    offered = {name: names.table(name, x) for name, x in (tables or {}).items()}
    described = tuple(_layer(names, layer) for layer in layers)
    kept = tuple(_checkpoint(names, checkpoint) for checkpoint in checkpoints)
    return FileContents(described, kept, tuple(names.ropes), names.tensors, names.external, offered)


def _checkpoint(names: _Names, checkpoint: EncodedCheckpoint) -> Checkpoint:
    layers = {path: _layer(names, layer) for path, layer in checkpoint.layers.items()}
    return Checkpoint(tokens=checkpoint.tokens, layers=layers, message=checkpoint.message)


def _layer(names: _Names, layer: EncodedLayer) -> Layer:
    return Layer(
        kind=layer.kind,
        scalars=layer.scalars,
        tensors={name: _tensor(names, tensor) for name, tensor in layer.tensors.items()},
        children=tuple(_layer(names, child) for child in layer.children),
    )


def _tensor(names: _Names, tensor: EncodedTensor) -> Tensor:
    segments = []
    for i, segment in enumerate(tensor.segments):
        path = f"{tensor.path}.{i}"
        if isinstance(segment, ReferencedSegment):
            segments.append(_referenced(names, segment, path))
        else:
            segments.append(_encoded(names, segment, path, tensor.counts_tokens))
    return Tensor(
        dtype=tensor.dtype, shape=tensor.shape, segments=tuple(segments), note=tensor.note
    )


def _referenced(names: _Names, segment: ReferencedSegment, path: str) -> Segment:
    names.know(segment.tables)
    parts = {part: names.external_part(f"{path}.{part}", s) for part, s in segment.stored.items()}
    rope = names.rope(segment.rope)
    return structs.replace(segment.segment, parts=parts, rope=rope, tokens=segment.tokens)


def _encoded(names: _Names, run: EncodedRun, path: str, counts_tokens: bool) -> Segment:
    codec = run.codec
    parts = {
        part: names.part(f"{path}.{part}", run.roles[part], run.parts[part])
        for part in codec.roles  # the order of parts does not depend on where they came from
        if part in run.parts
    }
    return Segment(
        codec=codec.id,
        version=codec.version,
        params=dataclasses.asdict(codec),  # type: ignore[call-overload]
        tokens=run.tokens if counts_tokens else None,
        parts=parts,
        rope=names.rope(run.rope),
    )


class _Names:
    """Names of stored tensors, external references and ropes, as a file collects them."""

    def __init__(self, request: SaveRequest):
        self.ropes = list(request.ropes)
        self.tensors: dict[str, Pending] = {}
        self.external: dict[str, Stored] = {}
        self._known: dict[tuple[object, ...], Stored] = {}
        self._shared: dict[tuple[object, ...], str] = {}
        self.know(request.tables())

    def know(self, tables: Iterable[Stored]) -> None:
        """Refer to these tables of other files where the same ones are wanted."""
        self._known |= {(t.dtype, t.shape, t.digest): t for t in tables}

    def rope(self, rope: Rope | None) -> int | None:
        """Return the index of ``rope``, which is added if it is new."""
        if rope is None:
            return None
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def part(self, name: str, role: str, x: mx.array) -> str:
        """Store ``x`` and return its name; a table that is stored already keeps its own."""
        if role == "table":
            return self.table(name, x)
        waiting = [x]  # let go once it is written
        self.tensors[name] = Pending(role, NAMES[x.dtype], x.shape, lambda: stored(waiting.pop()))
        return name

    def table(self, name: str, x: mx.array) -> str:
        """Store a table once, or refer to an equal one of another file."""
        data, form = copied(x), (NAMES[x.dtype], x.shape)
        key = (*form, container_write.digest(data))
        if key in self._known:
            return self.external_part(name, self._known[key])
        if key not in self._shared:
            self.tensors[name] = Pending("table", *form, lambda: data)
            self._shared[key] = name
        return self._shared[key]

    def external_part(self, name: str, other: Stored) -> str:
        """Return the name that a tensor of another file has in this one."""
        key = (other.dtype, other.shape, other.digest)
        if other.role != "table":
            self.external[name] = other
            return name
        if key not in self._shared:
            self.external[name] = other
            self._shared[key] = name
        return self._shared[key]
