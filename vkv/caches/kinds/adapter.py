"""Define what a kind's module offers, and what a cache is taken apart into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vkv.caches.encoded import EncodedRun
from vkv.caches.provenance import Provenance
from vkv.codecs.protocol import DTYPES, NAMES
from vkv.errors import CacheError
from vkv.format.kinds import Kind

#: Sizes that a shape in a file may have.
MAX_NDIM = 8
#: A loaded tensor by name: an array, or codec and parts for caches that keep codes.
Loaded = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a cache: codes that the cache itself holds, then an array.

    Args:
        shape: Logical shape, ``(B, H, T, D)`` for keys and values.
        dtype: Logical dtype.
        x: What follows the codes, the whole tensor if there are none; ``None`` for nothing.
        encoded: Codes, in order.
        tokens: Whether axis -2 counts tokens.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    x: mx.array | None = None
    encoded: tuple[EncodedRun, ...] = ()
    tokens: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the dtype by its name: MLX's cannot be pickled."""
        return _value, (self.shape, NAMES[self.dtype], self.x, self.encoded, self.tokens)


def _value(shape: tuple[int, ...], dtype: str, *rest: Any) -> Value:
    return Value(shape, DTYPES[dtype], *rest)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One cache: its kind, scalars, tensors, and children (of a CacheList).

    ``provenance`` is the stored layer that the cache was loaded from, if any.
    """

    kind: str
    scalars: dict[str, int] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    children: list[Snapshot] = field(default_factory=list)
    provenance: Provenance | None = None

    def walk(self) -> list[Snapshot]:
        """Return itself, then its children's own."""
        return [self, *(below for child in self.children for below in child.walk())]


class Packed(ABC):
    """A cache of vkv's own that holds codes: it takes itself apart."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return what ``vkv.save`` stores of it."""

    @property
    @abstractmethod
    def offset(self) -> int:
        """Tokens that it holds."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it holds."""

    @abstractmethod
    def trim(self, n: int) -> int:
        """Drop the last ``n`` tokens and return how many were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Take a cache of one kind apart, make it again, and cut it.

    Attributes of mlx-lm's classes are read and set; its ``state`` tuples are never
    used, since they changed between its releases. Only tokens that exist are taken,
    never the padding of a growing buffer.

    Attributes:
        kind: The kind, as far as it can be described without MLX.
        scalars: Cache to its numbers.
        values: Cache and numbers to its tensors.
        make: Class, numbers and loaded tensors to cache.
        cut: Keep the first so many tokens of a cache, in place.
        children: Cache to the caches inside it.
        visible: Snapshot to one without the rows that no later token can see.
        saved_numbers: Names of its numbers in a file of mlx-lm 0.24 to 0.31; each
            alternative is told by its length.
        saved_state: Names of its state in a file of mlx-lm 0.32.
    """

    kind: Kind
    scalars: Callable[[Any], dict[str, int]]
    values: Callable[[Any, dict[str, int]], dict[str, Value]]
    make: Callable[[Any, dict[str, int], Loaded], Any]
    cut: Callable[[Any, int], None]
    children: Callable[[Any], Sequence[Any]] = lambda cache: ()
    visible: Callable[[Snapshot], Snapshot] = lambda taken: taken
    saved_numbers: tuple[tuple[str, ...], ...] = ((),)
    saved_state: tuple[str, ...] = ()


def numbers(cache: Any, **attributes: str) -> dict[str, int]:
    """Return scalars by name, from attributes that must be whole numbers (L2)."""
    scalars = {name: getattr(cache, attribute) for name, attribute in attributes.items()}
    for name, value in scalars.items():
        if type(value) is not int:
            text = f"{name} is of type {type(value).__name__}, expected a whole number"
            raise CacheError(text, rule="L2")
    return scalars


def array(x: Any, name: str) -> mx.array:
    """Return ``x`` if it is an array that a file can hold (L2)."""
    if not isinstance(x, mx.array):
        raise CacheError(f"{type(x).__name__}, expected an array", rule="L2", at=name)
    if x.dtype not in NAMES or x.ndim > MAX_NDIM:
        raise CacheError(f"no file can hold {x.dtype} {x.shape}", rule="L2", at=name)
    return x


def first_rows(x: Any, count: int, name: str) -> mx.array:
    """Return the first ``count`` rows of ``(B, H, T, D)``."""
    rows = array(x, name)
    if rows.ndim != 4:  # B, H, T, D
        raise CacheError(f"{rows.shape}, expected (B, H, T, D)", rule="L2", at=name)
    return rows[..., :count, :]


def keys_and_values(cache: Any, count: int) -> dict[str, Value]:
    """Return keys and values of the first ``count`` rows; nothing for an empty cache."""
    if cache.keys is None or count == 0:
        return {}
    rows = {name: first_rows(getattr(cache, name), count, name) for name in ("keys", "values")}
    return {name: Value(x.shape, x.dtype, x) for name, x in rows.items()}


def with_rows(cache: Any, loaded: Loaded) -> Any:
    """Give loaded keys and values to a new cache, and return it."""
    cache.keys, cache.values = loaded.get("keys"), loaded.get("values")
    return cache


def trim(cache: Any, tokens: int) -> None:
    """Keep the first ``tokens`` tokens of a cache that counts them in ``offset``."""
    cache.trim(max(cache.offset - tokens, 0))
