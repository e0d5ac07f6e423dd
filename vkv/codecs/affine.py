"""``affine``: MLX's own group quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx

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
)
from vkv.errors import CodecError
from vkv.format.dtypes import FLOATS
from vkv.format.limits import BITS, GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Codes plus one scale and one bias per group of consecutive channels.

    For channel ``d`` of group ``g = d // group``::

        x[..., d] = scales[..., g] * codes[..., d] + biases[..., g]

    With ``x`` of shape ``(B, H, T, D)`` (batch, KV heads, tokens, head dim):

    ========  =======  ======================  ==========================
    part      dtype    shape                   meaning
    ========  =======  ======================  ==========================
    codes     U32      (B, H, T, D*bits/32)    packed, low bits first
    scales    scale    (B, H, T, D/group)      step size, same unit as x
    biases    scale    (B, H, T, D/group)      value of code 0
    ========  =======  ======================  ==========================

    Raises:
        CodecError: An option is out of its range (rule A1).

    Source: MLX ``mx.quantize(mode="affine")``, mlx 0.32; ``spec/v1/codecs/affine.md``.
    """

    id: ClassVar[str] = "affine"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits()
    roles: ClassVar[dict[str, str]] = {
        "codes": "payload",
        "scales": "metadata",
        "biases": "metadata",
    }
    pre_rope: ClassVar[bool] = False
    window: ClassVar[int] = 1
    min_tokens: ClassVar[int] = 1
    refit_interval: ClassVar[int] = 0
    examples: ClassVar[tuple[str, ...]] = tuple(f"affine:bits={b}" for b in (2, 3, 4, 8))

    bits: int = option(4, "Bits per code.", choices=BITS)
    group: int = option(64, "Channels that share a scale.", choices=GROUPS)
    scale: str = option(
        "F16",
        "Dtype of scales and biases; not given, BF16 for a tensor of BF16, else F16.",
        choices=FLOATS,
    )

    def __post_init__(self) -> None:
        check_options(self, "A1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        scale = "BF16" if dtype == "BF16" else "F16"
        return cls(**{"scale": scale, **options})  # type: ignore[arg-type]  # checked when built

    def for_rotated_keys(self) -> Self:
        return self

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        if NAMES.get(dtype) not in FLOATS:
            return f"dtype {dtype} is not a float that mx.quantize takes"
        if not shape or shape[-1] % self.group:
            dim = shape[-1] if shape else 0
            return f"head dim {dim} is not a multiple of group {self.group}"
        return None

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        return 0, tokens

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each part for an ``x`` of the given shape (rule A2)."""
        *lead, dim = shape or (0,)
        if not lead or dim % self.group:
            raise CodecError(
                f"shape {shape}, expected rows of a multiple of {self.group}",
                rule="A2",
                at="affine",
            )
        groups = (*lead, dim // self.group)
        return {
            "codes": ("U32", (*lead, dim * self.bits // 32)),
            "scales": (self.scale, groups),
            "biases": (self.scale, groups),
        }

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        check_layout(self, parts, shape)
        for name in ("scales", "biases"):
            if not mx.isfinite(parts[name]).all():
                raise CodecError("holds values that are not finite", rule="A3", at=name)

    def encode(self, x: mx.array) -> Parts:
        x = x.astype(DTYPES[self.scale])  # MLX returns scales in the dtype of x
        codes, scales, biases = mx.quantize(x, group_size=self.group, bits=self.bits)
        # A NaN leaves no trace in the scale of its group.
        if not (mx.isfinite(x).all() & mx.isfinite(scales).all() & mx.isfinite(biases).all()):
            raise CodecError(
                f"found values that are not finite in {self.scale}, expected finite ones",
                rule="A3",
                at="affine",
            )
        return {"codes": codes, "scales": scales, "biases": biases}

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        return self.encode(x)

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        return [Planned(self)] * len(pieces)

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.dequantize(
            parts["codes"], parts["scales"], parts["biases"], group_size=self.group, bits=self.bits
        ).astype(dtype)

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        return None

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        return {name: part[..., :tokens, :] for name, part in parts.items()}

    def join(self, pieces: list[Parts]) -> Parts | None:
        return {name: mx.concatenate([p[name] for p in pieces], axis=-2) for name in self.roles}
