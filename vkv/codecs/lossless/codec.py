"""`lossless`: the values themselves, entropy-coded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import mlx.core as mx
import numpy as np

from vkv.codecs.lossless import tensor as tensors
from vkv.codecs.lossless.channels import MAX_GROUPS
from vkv.codecs.lossless.planes import LAYOUTS
from vkv.codecs.options import check_options, option
from vkv.codecs.protocol import (
    DTYPES,
    NAMES,
    FusedContext,
    Layout,
    Options,
    Parts,
    Piece,
    Planned,
    Traits,
    check_layout,
    memory,
)
from vkv.errors import CodecError
from vkv.format.dtypes import FLOATS

#: A record's size is a U32.
MAX_CHANNELS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless:
    """Gives every bit back: NaN payloads, signs of zeros and subnormal numbers included.

    ``x`` is any array of floats, not only ``(B, H, T, D)``. Its tokens are axis -2; all
    other axes together are channels.

    =====  =====  ========  ==========================================
    part   dtype  shape     meaning
    =====  =====  ========  ==========================================
    codes  U8     (bytes,)  records (``vkv.codecs.lossless.records``)
    =====  =====  ========  ==========================================

    Raises:
        CodecError: An option is out of its range (rule X1).

    Source: ``spec/v1/codecs/lossless.md``; DFloat11 (arXiv 2504.11651) codes exponents of weights.
    """

    id: ClassVar[str] = "lossless"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(lossless=True)
    roles: ClassVar[dict[str, str]] = {"codes": "payload"}
    examples: ClassVar[tuple[str, ...]] = ("lossless",)
    pre_rope: ClassVar[bool] = False
    window: ClassVar[int] = 1
    min_tokens: ClassVar[int] = 1
    refit_interval: ClassVar[int] = 0

    dtype: str = option("BF16", "Dtype of the values; not given, the tensor's own.", choices=FLOATS)
    record: int = option(
        512,
        "Tokens that are coded together, each time with tables of their own; more where a token "
        "has few channels.",
        low=1,
        high=1 << 16,
    )
    groups: int = option(
        8, "Groups of channels with a code of their own, at most.", low=1, high=MAX_GROUPS
    )

    def __post_init__(self) -> None:
        check_options(self, "X1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        """Build from a codec string's options, for the dtype of the tensor.

        Only keys differ enough in form for more groups than one: in values these would save
        .02 bits, and take a third more time to decode.
        """
        own = {"dtype": dtype if dtype in FLOATS else "BF16"}
        groups = {} if tensor == "keys" else {"groups": 1}
        return cls(**{**own, **groups, **options})  # type: ignore[arg-type]  # checked when built

    def for_rotated_keys(self) -> Self:
        """Return the same codec: it never asks for other keys than those in the cache."""
        return self

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        """Return why a tensor of this shape and dtype cannot be encoded, or ``None``."""
        name = NAMES.get(dtype)
        if name not in FLOATS:
            return f"dtype {name or dtype} is not F16, BF16 or F32"
        if name != self.dtype:
            return f"its dtype is {name}"
        if not prod(shape) or not shape:
            return f"shape {shape} has no axes or no elements"
        if prod(shape) // tensors.count_tokens(shape) > MAX_CHANNELS:
            return f"more than {MAX_CHANNELS} elements a token"
        return None

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        """Encode all tokens."""
        return 0, tokens

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of the part for an ``x`` of the given shape (rule X2)."""
        if not shape or not prod(shape):
            raise CodecError(
                f"shape {shape}, expected one or more sizes, all above 0", rule="X2", at="lossless"
            )
        return {"codes": ("U8", (None,))}

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form (K3) and the sizes of records (X3, X4); ``decode`` checks the rest."""
        check_layout(self, parts, shape)
        tensors.scan(memory(parts["codes"]), shape)

    def encode(self, x: mx.array) -> Parts:
        """Encode values of any bits.

        Raises:
            CodecError: The shape is refused (X2), or the dtype is another one (X8).
        """
        self.layout(x.shape)
        if NAMES.get(x.dtype) != self.dtype:
            raise CodecError(
                f"values of {NAMES.get(x.dtype)}, expected {self.dtype}", rule="X8", at="lossless"
            )
        settings = self._settings()
        values = np.frombuffer(memory(mx.contiguous(x)), settings.layout.word).reshape(x.shape)
        return _parts(tensors.write(values, settings))

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        """Encode tokens that follow others; nothing is taken over from these."""
        return self.encode(x)

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        """Return this codec for each tensor."""
        return [Planned(self)] * len(pieces)

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Decode to an array of ``shape``, cast where ``dtype`` is not its own.

        Raises:
            CodecError: A record is not what it must be (X3 to X11).
        """
        values = tensors.read(memory(parts["codes"]), shape, LAYOUTS[self.dtype])
        return mx.array(values).view(DTYPES[self.dtype]).astype(dtype)

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        """Return ``None``: there is no kernel."""
        return None

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        """Return the first records, the one that is cut through coded anew; nothing is lost."""
        return _parts(tensors.cut(memory(parts["codes"]), shape, tokens, self._settings()))

    def join(self, pieces: list[Parts]) -> Parts | None:
        """Return all records, those that are short together coded anew; nothing is lost."""
        codes = [memory(p["codes"]) for p in pieces]
        return _parts(tensors.join(codes, self._settings()))

    def _settings(self) -> tensors.Settings:
        return tensors.Settings(LAYOUTS[self.dtype], self.record, self.groups)


def is_smaller(x: mx.array, sample: int = 1024) -> bool:
    """Return whether ``lossless`` stores a tensor in fewer bytes than ``raw``.

    Args:
        x: Any array; only floats can be.
        sample: Tokens from its middle that are encoded to find out.
    """
    codec = Lossless.configure({}, "keys", NAMES.get(x.dtype, ""))
    if codec.refuses(x.shape, x.dtype) is not None:
        return False
    start = max(0, tensors.count_tokens(x.shape) - sample) // 2
    part: mx.array = x if x.ndim < 2 else x[..., start : start + sample, :]
    return bool(codec.encode(part)["codes"].nbytes < part.nbytes)


def _parts(codes: Iterable[tensors.Bytes]) -> Parts:
    return {"codes": mx.array(np.frombuffer(b"".join(codes), np.uint8))}
