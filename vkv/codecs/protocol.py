"""What every codec is: parameters, a layout, and the way there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import mlx.core as mx

from vkv.errors import CodecError
from vkv.format.schema import ITEMSIZE, Scalar

#: Part name -> array.
Parts = dict[str, mx.array]
#: Part name -> (dtype, shape). A size of ``None`` is set by the data (entropy-coded bytes).
Layout = dict[str, tuple[str, tuple[int | None, ...]]]
#: Options of a codec string, or a header's params.
Options = dict[str, Scalar]

DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32,
    "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64, "C64": mx.complex64,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32")
NAMES: dict[mx.Dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Codec(Protocol):
    """Turns a tensor ``(B, H, T, D)`` into named parts and back.

    A codec is a frozen dataclass; its fields are what the header records as
    ``params`` and are checked when built. One ``(id, version)`` names one layout
    forever.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    #: Part name -> role in the byte account (``vkv.header.ROLES``).
    roles: ClassVar[dict[str, str]]
    #: Codec strings that ``vkv bench`` runs.
    examples: ClassVar[tuple[str, ...]]

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        """Build from a codec string's options.

        Args:
            options: What the user gave, of the right types.
            tensor: ``"keys"`` or ``"values"``.
            dtype: Dtype of the tensor, as safetensors names it.
        """

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        """Why a tensor of this shape and dtype cannot be encoded, or ``None``."""

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        """Of ``tokens`` tokens from position ``start`` on: ``(lead, body)``.

        ``lead`` leading tokens are stored raw as sinks, ``body`` are encoded, and
        what remains is stored raw as the residual.
        """

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Dtype and shape of each part for an ``x`` of the given shape."""

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form and value ranges of ``parts``; after it ``decode`` is safe."""

    def encode(self, x: mx.array) -> Parts:
        """``x`` of shape ``(B, H, T, D)`` to parts."""

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Parts to an array of ``shape`` and ``dtype``."""

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        """Parts of the first ``tokens`` tokens, without re-encoding; ``None`` if impossible."""

    def join(self, pieces: list[Parts]) -> Parts | None:
        """Parts of consecutive segments as those of one; ``None`` if impossible."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to plan for.

    Attributes:
        layer: Place of its cache among all caches.
        keys: Keys (not rotated, where they can be), or values.
        x: The tokens to be encoded, sinks too, ``(B, H, T, D)`` in the tensor's dtype.
        start: Position of the first of them.
        basis: A table made from other texts, in another file, to encode the tensor with.
    """

    layer: int
    keys: bool
    x: mx.array
    start: int = 0
    basis: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """What a piece gets.

    Attributes:
        codec: ``raw`` where the codec asked for cannot hold it.
        parts: What the codec makes of the tokens in its ``span``; ``None`` for ``raw``.
        note: Why ``raw``.
    """

    codec: Codec
    parts: Parts | None = None
    note: str | None = None


@runtime_checkable
class Planner(Protocol):
    """A codec that looks at all tensors of a cache before it encodes the first."""

    def plan(self, pieces: Sequence[Piece], overhead: int) -> Sequence[Planned]:
        """A codec for each piece, and what it makes of it.

        Called on what ``configure`` makes of the options for keys.

        Args:
            pieces: The tensors of all layers.
            overhead: Bytes of the file beside them, which count as theirs.
        """


def typed(codec: type[Any], options: dict[str, str]) -> Options:
    """Convert a codec string's text values to the types of the dataclass's fields.

    Raises:
        CodecError: An unknown option, or text that is not of its type (K2).
    """
    kinds = {f.name: f.type for f in fields(codec)}
    out: Options = {}
    for name, text in options.items():
        if name not in kinds:
            raise CodecError(
                f"unknown option {name!r}; {codec.id} takes {', '.join(kinds) or 'none'}",
                rule="K2",
                at=codec.id,
            )
        out[name] = _convert(text, kinds[name], f"{codec.id}.{name}")
    return out


def _convert(text: str, kind: Any, at: str) -> Scalar:
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text)
        return float(text) if kind == "float" else text
    except (ValueError, KeyError):
        raise CodecError(f"{text!r} is not of type {kind}", rule="K2", at=at) from None


def build(codec: type[Any], params: Options) -> Any:
    """``codec(**params)``, with unknown or missing names as a ``CodecError`` (K2)."""
    known = {f.name for f in fields(codec)}
    if unknown := sorted(params.keys() - known):
        raise CodecError(f"unknown parameter {unknown[0]!r}", rule="K2", at=codec.id)
    if missing := sorted(known - params.keys()):
        raise CodecError(f"parameter {missing[0]!r} is missing", rule="K2", at=codec.id)
    try:
        return codec(**params)
    except TypeError as exc:
        raise CodecError(str(exc), rule="K2", at=codec.id) from None


def check_choice(at: str, value: object, allowed: tuple[object, ...], rule: str) -> None:
    """Refuse a value that is not one of ``allowed``, types included (``4.0`` is not ``4``)."""
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise CodecError(f"{value!r} is not one of {allowed}", rule=rule, at=at)


def check_layout(codec: Codec, parts: Parts, shape: tuple[int, ...]) -> None:
    """Compare ``parts`` with ``codec.layout(shape)``: names, dtypes, shapes (K3)."""
    want = codec.layout(shape)
    have = {n: (NAMES.get(a.dtype, str(a.dtype)), a.shape) for n, a in parts.items()}
    check_forms(want, have)


def check_forms(want: Layout, have: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """The same on names, dtypes and shapes alone, before anything is read (K3)."""
    for name in sorted(want.keys() | have.keys()):
        expected, found = want.get(name), have.get(name)
        if expected is None or found is None or not _fits(expected, found):
            raise CodecError(f"found {found}, expected {expected}", rule="K3", at=name)


def _fits(want: tuple[str, tuple[int | None, ...]], have: tuple[str, tuple[int, ...]]) -> bool:
    return (
        want[0] == have[0]
        and len(want[1]) == len(have[1])
        and all(w is None or w == h for w, h in zip(want[1], have[1], strict=True))
    )


def finite(*arrays: mx.array) -> bool:
    """Whether everything in these F16 arrays is finite; a GPU is waited for once."""
    bits = [x.view(mx.uint16).flatten() for x in arrays if x.size]
    return not bits or int((mx.concatenate(bits) & 0x7FFF).max()) < 0x7C00


def nbytes(codec: Codec, shape: tuple[int, ...]) -> int:
    """Stored size in bytes of the parts whose size the shape alone fixes."""
    return sum(
        prod(n for n in dims if n is not None) * ITEMSIZE[dtype]
        for dtype, dims in codec.layout(shape).values()
        if None not in dims
    )


def memory(x: mx.array) -> memoryview:
    """The bytes of an evaluated, contiguous array, without a copy."""
    if x.size == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    x = x.reshape(1) if x.ndim == 0 else x
    data: Any = x if x.dtype == mx.uint8 else x.view(mx.uint8)
    return memoryview(data).cast("B")
