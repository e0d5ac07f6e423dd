"""State what every codec must offer, and all that its callers may ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import mlx.core as mx

from vkv.errors import CodecError
from vkv.format.schema import Rope, Scalar

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
NAMES: dict[mx.Dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about a codec that its callers act on; the defaults are those of most codecs.

    Attributes:
        verbatim: Its one part is the tensor itself: nothing is computed to read it.
        lossless: ``decode`` returns what ``encode`` was given, bit for bit.
        plans: ``plan`` looks at all tensors of a cache before the first is encoded.
        takes_basis: ``plan`` can encode with a table of another file (``Piece.basis``).
        reuses_tables: ``encode_after`` goes on with the tables of the segment before, so
            that any number of tokens can follow; its parts must be given to it.
        expensive_part: The part that costs far more than its bytes, each time it is
            read (T23).
        decode_validates: ``decode`` checks all that ``validate`` does, so that parts which
            are decoded at once need not be validated before.
        other_roles: Roles that its parts may have instead of those in ``Codec.roles``.
    """

    verbatim: bool = False
    lossless: bool = False
    plans: bool = False
    takes_basis: bool = False
    reuses_tables: bool = False
    expensive_part: str | None = None
    decode_validates: bool = False
    other_roles: tuple[str, ...] = ()


class FusedContext(NamedTuple):
    """Exact tokens around encoded ones, for a kernel that writes all of them at once.

    Attributes:
        head: Tokens before them, ``(B, H, n, D)`` in the dtype wanted.
        tail: Tokens behind them.
        rope: Applied to the decoded keys, of which the first is at position ``n``.
    """

    head: mx.array | None = None
    tail: mx.array | None = None
    rope: Rope | None = None


#: No tokens around the encoded ones.
ALONE = FusedContext()


class Codec(Protocol):
    """Turns a tensor ``(B, H, T, D)`` into named parts and back.

    A codec is a frozen dataclass; its fields are what the header records as
    ``params`` and are checked when built. One ``(id, version)`` names one layout
    forever.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    traits: ClassVar[Traits]
    #: Part name -> role in the byte account (``vkv.format.schema.ROLES``).
    roles: ClassVar[dict[str, str]]
    #: Codec strings that ``vkv bench`` runs.
    examples: ClassVar[tuple[str, ...]]

    @property
    def pre_rope(self) -> bool:
        """Ask for keys without their rotary embedding."""

    @property
    def window(self) -> int:
        """Return the tokens that are encoded together; ``prefix`` can cut between windows."""

    @property
    def min_tokens(self) -> int:
        """Return the fewest tokens, sinks not counted, of which ``span`` encodes any."""

    @property
    def refit_interval(self) -> int:
        """Return the tokens of a segment after which a live cache fits new tables; 0: never."""

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        """Build from a codec string's options.

        Args:
            options: What the user gave, of the right types.
            tensor: ``"keys"`` or ``"values"``.
            dtype: Dtype of the tensor, as safetensors names it.
        """

    def for_rotated_keys(self) -> Self:
        """Return the same codec for keys that keep their rotary embedding."""

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        """Return why a tensor of this shape and dtype cannot be encoded, or ``None``."""

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        """Split ``tokens`` tokens from position ``start`` on: ``(lead, body)``.

        ``lead`` leading tokens are stored raw as sinks, ``body`` are encoded, and
        what remains is stored raw as the residual.
        """

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each part for an ``x`` of the given shape."""

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form and value ranges of ``parts``; after it ``decode`` is safe."""

    def encode(self, x: mx.array) -> Parts:
        """Encode ``x`` of shape ``(B, H, T, D)``."""

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        """Encode tokens that follow a segment of this codec.

        Args:
            x: ``(B, H, T, D)``.
            earlier: Parts of that segment. Where ``traits.reuses_tables``, its tables
                become those of the new parts.
        """

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        """Choose a codec for each tensor, and encode all of them.

        Called on what ``configure`` makes of the options for keys, where ``traits.plans``.
        Other codecs return themselves for each tensor, and encode nothing.

        Args:
            pieces: The tensors of all layers.
            overhead: Bytes of the file beside them, which count as theirs.
            force: Also where the rate that was asked for leaves too little for the values.

        Raises:
            CodecError: It does, and it is not forced.
        """

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Decode to an array of ``shape`` and ``dtype``."""

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        """Decode, rotate and join with the exact tokens around, in one kernel.

        Returns:
            ``(B, H, n + T + m, D)`` for ``n`` tokens before and ``m`` behind; ``None``
            where there is no such kernel for this device, shape or context.
        """

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        """Return parts of the first ``tokens`` tokens, with no error added, or ``None``."""

    def join(self, pieces: list[Parts]) -> Parts | None:
        """Return parts of consecutive segments as those of one, or ``None``."""


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
    """A codec chosen for one tensor.

    Attributes:
        codec: ``raw`` where the codec asked for cannot hold it.
        parts: The encoded tokens of the ``span``; ``None`` where they are still to be encoded.
        note: Why ``raw``.
    """

    codec: Codec
    parts: Parts | None = None
    note: str | None = None


def check_layout(codec: Codec, parts: Parts, shape: tuple[int, ...]) -> None:
    """Compare ``parts`` with ``codec.layout(shape)``: names, dtypes, shapes (K3)."""
    want = codec.layout(shape)
    have = {n: (NAMES.get(a.dtype, str(a.dtype)), a.shape) for n, a in parts.items()}
    check_forms(want, have)


def check_forms(want: Layout, have: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare a layout with names, dtypes and shapes, before anything is read (K3)."""
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
    """Return whether all values of these F16 arrays are finite; wait for a GPU once."""
    bits = [x.view(mx.uint16).flatten() for x in arrays if x.size]
    return not bits or int((mx.concatenate(bits) & 0x7FFF).max()) < 0x7C00


def memory(x: mx.array) -> memoryview:
    """Return the bytes of an evaluated, contiguous array, without a copy."""
    if x.size == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    x = x.reshape(1) if x.ndim == 0 else x
    data: Any = x if x.dtype == mx.uint8 else x.view(mx.uint8)
    return memoryview(data).cast("B")
