"""One adapter per mlx-lm cache class: its content as tensors and scalars, and back.

Attributes of the known classes are read and set; mlx-lm's ``state`` tuples are
never used, since they changed between its versions. Only tokens that exist are
taken, never the padding of a growing buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from vkv.caches import provenance as origin
from vkv.caches.encoded import Kept
from vkv.caches.provenance import Origin
from vkv.codecs.affine import Affine
from vkv.codecs.protocol import NAMES
from vkv.errors import CacheError


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a cache: codes that the cache itself holds, then an array.

    Args:
        shape: Logical shape, ``(B, H, T, D)`` for keys and values.
        dtype: Logical dtype.
        x: What follows the codes, the whole tensor if there are none; ``None`` for nothing.
        kept: Codes, in order.
        tokens: Whether axis -2 counts tokens.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    x: mx.array | None = None
    kept: tuple[Kept, ...] = ()
    tokens: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One cache: its kind, scalars, tensors, and children (of a CacheList).

    ``origin`` is the stored layer that the cache was loaded from, if any.
    """

    kind: str
    scalars: dict[str, int] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    children: list[Snapshot] = field(default_factory=list)
    origin: Origin | None = None

    def walk(self) -> list[Snapshot]:
        """Itself, then its children's own."""
        return [self, *(below for child in self.children for below in child.walk())]


#: Sizes that a shape in a file may have.
MAX_NDIM = 8


class Packed(ABC):
    """A cache of vkv's own that holds codes: it takes itself apart."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """What ``vkv.save`` stores of it."""


#: What a loaded tensor is: an array, or codec and parts for caches that keep codes.
Loaded = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one cache class is taken apart and made again.

    Args:
        name: Name in the file; its meaning is in ``spec/v1/format.md``.
        cls: Name of the class in ``mlx_lm.models.cache``.
        take: Cache to snapshot.
        make: Class, scalars and loaded tensors to cache.
        codes: The cache holds affine codes, so they are handed to ``make`` undecoded.
    """

    name: str
    cls: str
    take: Callable[[Any], Snapshot]
    make: Callable[[Any, dict[str, int], Loaded], Any]
    codes: bool = False


def _numbers(cache: Any, **attributes: str) -> dict[str, int]:
    """Scalars by name, from attributes that must be whole numbers (L2)."""
    found = {name: getattr(cache, attribute) for name, attribute in attributes.items()}
    for name, value in found.items():
        if type(value) is not int:
            text = f"{name} is of type {type(value).__name__}, expected a whole number"
            raise CacheError(text, rule="L2")
    return found


def _array(x: Any, name: str) -> mx.array:
    """Return ``x`` if it is an array that a file can hold (L2)."""
    if not isinstance(x, mx.array):
        raise CacheError(f"{type(x).__name__}, expected an array", rule="L2", at=name)
    if x.dtype not in NAMES or x.ndim > MAX_NDIM:
        raise CacheError(f"no file can hold {x.dtype} {x.shape}", rule="L2", at=name)
    return x


def _first(x: Any, count: int, name: str) -> mx.array:
    """The first ``count`` rows of ``(B, H, T, D)``."""
    held = _array(x, name)
    if held.ndim != 4:
        raise CacheError(f"{held.shape}, expected (B, H, T, D)", rule="L2", at=name)
    return held[..., :count, :]


def _rows(cache: Any, count: int) -> dict[str, Value]:
    """Keys and values of the first ``count`` slots; nothing for an empty cache."""
    if cache.keys is None or count == 0:
        return {}
    rows = {name: _first(getattr(cache, name), count, name) for name in ("keys", "values")}
    return {name: Value(x.shape, x.dtype, x) for name, x in rows.items()}


def _set_rows(cache: Any, loaded: Loaded) -> Any:
    cache.keys, cache.values = loaded.get("keys"), loaded.get("values")
    return cache


def _take_kv(cache: Any) -> Snapshot:
    scalars = _numbers(cache, offset="offset")
    return Snapshot("kv", scalars, _rows(cache, cache.offset))


def _make_kv(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = _set_rows(cls(), loaded)
    cache.offset = scalars["offset"]
    return cache


def _take_concatenate(cache: Any) -> Snapshot:
    scalars = _numbers(cache, offset="offset")
    return Snapshot("concatenate", scalars, _rows(cache, cache.offset))


def _take_rotating(cache: Any) -> Snapshot:
    scalars = _numbers(cache, offset="offset", keep="keep", max_size="max_size", idx="_idx")
    return Snapshot("rotating", scalars, _rows(cache, cache.offset))


def _make_rotating(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = _set_rows(cls(scalars["max_size"], keep=scalars["keep"]), loaded)
    cache.offset, cache._idx = scalars["offset"], scalars["idx"]
    return cache


def _take_chunked(cache: Any) -> Snapshot:
    scalars = _numbers(cache, offset="offset", chunk_size="chunk_size", start="start_position")
    return Snapshot("chunked", scalars, _rows(cache, cache.offset - cache.start_position))


def _make_chunked(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = _set_rows(cls(scalars["chunk_size"]), loaded)
    cache.offset, cache.start_position = scalars["offset"], scalars["start"]
    return cache


def _take_quantized(cache: Any) -> Snapshot:
    scalars = _numbers(cache, offset="offset", bits="bits", group_size="group_size")
    held = cache.keys is not None and cache.offset > 0
    names = ("keys", "values") if held else ()
    return Snapshot("quantized", scalars, {name: _codes(cache, name) for name in names})


def _codes(cache: Any, name: str) -> Value:
    held = getattr(cache, name)
    if not isinstance(held, tuple | list) or len(held) != len(Affine.roles):
        raise CacheError(f"{type(held).__name__}, expected three arrays", rule="L2", at=name)
    named = zip(Affine.roles, held, strict=True)
    parts = {part: _first(x, cache.offset, f"{name}.{part}") for part, x in named}
    scales = parts["scales"]
    codec = Affine(bits=cache.bits, group=cache.group_size, scale=NAMES[scales.dtype])
    shape = (*scales.shape[:-1], scales.shape[-1] * cache.group_size)
    codec.validate(parts, shape)
    return Value(shape, scales.dtype, kept=(Kept(codec, parts, scales.shape[-2], codec.roles),))


def _make_quantized(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    cache = cls(group_size=scalars["group_size"], bits=scalars["bits"])
    for name, (codec, parts) in loaded.items():
        if (codec.bits, codec.group) != (cache.bits, cache.group_size):
            raise CacheError(
                f"codes of {codec.bits} bits in groups of {codec.group}, the cache takes "
                f"{cache.bits} in {cache.group_size}",
                rule="L4",
                at=name,
            )
        setattr(cache, name, tuple(parts[p] for p in ("codes", "scales", "biases")))
    cache.offset = scalars["offset"]
    return cache


def _take_arrays(cache: Any) -> Snapshot:
    held = {str(i): x for i, x in enumerate(cache.cache)}
    held |= {name: getattr(cache, name, None) for name in ("left_padding", "lengths")}
    arrays = {name: _array(x, name) for name, x in held.items() if x is not None}
    values = {name: Value(x.shape, x.dtype, x, tokens=False) for name, x in arrays.items()}
    return Snapshot("arrays", {"size": len(cache.cache)}, values)


def _make_arrays(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    size = scalars["size"]
    cache = cls(size)
    cache.cache = [loaded.get(str(i)) for i in range(size)]
    cache.left_padding, cache.lengths = loaded.get("left_padding"), loaded.get("lengths")
    return cache


def _take_list(cache: Any) -> Snapshot:
    return Snapshot("list", children=[take(c) for c in cache.caches])


def _make_list(cls: Any, scalars: dict[str, int], loaded: Loaded) -> Any:
    return cls(*loaded["children"])


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kv", "KVCache", _take_kv, _make_kv),
        Kind("concatenate", "ConcatenateKVCache", _take_concatenate, _make_kv),
        Kind("quantized", "QuantizedKVCache", _take_quantized, _make_quantized, codes=True),
        Kind("rotating", "RotatingKVCache", _take_rotating, _make_rotating),
        Kind("chunked", "ChunkedKVCache", _take_chunked, _make_chunked),
        Kind("arrays", "ArraysCache", _take_arrays, _make_arrays),
        Kind("list", "CacheList", _take_list, _make_list),
    )
}


def cache_class(kind: Kind) -> Any:
    """The mlx-lm class of a kind; mlx-lm is imported only when a cache is touched."""
    from mlx_lm.models import cache

    return getattr(cache, kind.cls)


def _computed(snapshot: Snapshot) -> Snapshot:
    """Compute what is still lazy, before anything is written.

    MLX can compute an array only in the thread that began it.
    """
    try:
        mx.eval([(v.x, [kept.parts for kept in v.kept]) for v in snapshot.values.values()])
    except RuntimeError as exc:
        raise CacheError(
            f"holds an array that cannot be computed here ({exc}); call mx.eval on the cache in "
            "the thread that filled it",
            rule="L2",
        ) from None
    return snapshot


def take(cache: Any) -> Snapshot:
    """Take a live cache apart.

    Raises:
        CacheError: Not exactly one of the known classes (L1), or a content that
            no file can hold (L2). A subclass is refused by name: it may keep
            state that its base class knows nothing of.
    """
    if isinstance(cache, Packed):
        return cache.snapshot()
    for kind in KINDS.values():
        if type(cache) is cache_class(kind):
            return replace(_computed(kind.take(cache)), origin=origin.of(cache))
    known = ", ".join(kind.cls for kind in KINDS.values())
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    hint = "; extract one sequence of the batch first" if "Batch" in name else ""
    raise CacheError(f"cannot store a {name}; known caches are {known}{hint}", rule="L1")
