"""All that is to be written to a file: the codecs asked for, layers, and stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import mlx.core as mx
from msgspec import structs

from vkv.arrays.cache_file import CacheFile
from vkv.arrays.host_bytes import copied, stored
from vkv.codecs.protocol import NAMES
from vkv.codecs.registry import Choice
from vkv.format import container_write
from vkv.format.dtypes import ITEMSIZE
from vkv.format.schema import Layer, Rope, Stored
from vkv.sources import base

if TYPE_CHECKING:
    from vkv.caches.saving.delta import Parent

#: A tensor of more carried-over segments is joined where its codec can: each costs
#: header bytes, and a long conversation is saved many times.
MAX_SEGMENTS = 16
#: Segments of a whole file, at up to nine parts of about 170 bytes, that its header holds.
ALL_SEGMENTS = 640


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asked for: a codec for keys and one for values."""

    keys: Choice
    values: Choice

    def of(self, name: str) -> Choice:
        return self.values if name == "values" else self.keys


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


@dataclass(slots=True)
class Plan:
    """All that is to be written, in file order.

    Args:
        wish: The codecs asked for.
        ropes: Rotary embeddings of the model.
        layer_ropes: For each layer, an index into ``ropes``, or ``None``.
        reencode: Keep no codes of the files that the caches came from.
        most_segments: Carried-over segments a tensor may have before they are joined.
        parent: The file whose segments are referred to where they can be.
        basis: The file whose tables are used where the codec takes one.
        known: Tables that other files hold, by dtype, shape and digest.
    """

    wish: Wish
    ropes: list[Rope] = field(default_factory=list)
    layer_ropes: tuple[int | None, ...] = ()
    reencode: bool = False
    most_segments: int = MAX_SEGMENTS
    parent: Parent | None = None
    basis: CacheFile | None = None
    known: dict[tuple[object, ...], Stored] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    tensors: dict[str, Pending] = field(default_factory=dict)
    elsewhere: dict[str, Stored] = field(default_factory=dict)
    _shared: dict[tuple[object, ...], str] = field(default_factory=dict)

    def rope(self, rope: Rope) -> int:
        """Index of ``rope``, added if it is new."""
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def add(self, name: str, role: str, x: mx.array) -> str:
        """Store ``x`` under ``name``; a table that is stored already is named again."""
        form = NAMES[x.dtype], x.shape
        if role != "table":
            held = [x]  # let go once it is written
            self.tensors[name] = Pending(role, *form, lambda: stored(held.pop()))
            return name
        data = copied(x)
        key = (*form, container_write.digest(data))
        if key in self.known:
            return self.refer(name, self.known[key])
        if key not in self._shared:
            self.tensors[name] = Pending(role, *form, lambda: data)
            self._shared[key] = name
        return self._shared[key]

    def lend(self, basis: CacheFile) -> None:
        """Encode with the tables of ``basis`` and refer to them."""
        self.basis = basis
        own = bytes.fromhex(basis.document.id)
        tables = [basis.header.tensors[name] for name in basis.header.tables.values()]
        self.know(t if t.file else structs.replace(t, file=own) for t in tables)

    def table(self, path: str) -> mx.array | None:
        """The table lent to tensor ``path``, ``layers.3.keys``, if there is one."""
        if self.basis is None:
            return None
        name = self.basis.header.tables.get(f"{path}.basis")
        return None if name is None else self.basis.array(name)

    def know(self, tables: Iterable[Stored]) -> None:
        """Refer to these tables of other files where the same ones are wanted."""
        self.known |= {(t.dtype, t.shape, t.digest): t for t in tables}

    def refer(self, name: str, other: Stored) -> str:
        """Name under which ``other``, a tensor of another file, is known in this one."""
        key = (other.dtype, other.shape, other.digest)
        if other.role != "table":
            self.elsewhere[name] = other
            return name
        if key not in self._shared:
            self.elsewhere[name] = other
            self._shared[key] = name
        return self._shared[key]
