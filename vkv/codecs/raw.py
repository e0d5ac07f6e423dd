"""``raw``: the values as they are."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Lossless, any dtype, any shape: one part ``data`` of the tensor's own form.

    Raises:
        CodecError: ``dtype`` is not one that MLX has (rule R1).

    Source: ``spec/v1/codecs/raw.md``.
    """

    id: ClassVar[str] = "raw"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(
        verbatim=True, lossless=True, other_roles=("sink", "residual", "table")
    )
    roles: ClassVar[dict[str, str]] = {"data": "payload"}
    pre_rope: ClassVar[bool] = False
    window: ClassVar[int] = 1
    min_tokens: ClassVar[int] = 1
    refit_interval: ClassVar[int] = 0
    examples: ClassVar[tuple[str, ...]] = ("raw",)

    dtype: str = option(
        "F16",
        "Dtype to store, as safetensors names it; not given, the tensor's own.",
        choices=tuple(DTYPES),
    )

    def __post_init__(self) -> None:
        check_options(self, "R1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        return cls(**{"dtype": dtype, **options})  # type: ignore[arg-type]  # checked when built

    def for_rotated_keys(self) -> Self:
        return self

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        if dtype not in NAMES:
            return f"dtype {dtype} has no safetensors name"
        return None if NAMES[dtype] == self.dtype else f"its dtype is {NAMES[dtype]}"

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        return 0, tokens

    def layout(self, shape: tuple[int, ...]) -> Layout:
        return {"data": (self.dtype, shape)}

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        check_layout(self, parts, shape)

    def encode(self, x: mx.array) -> Parts:
        return {"data": x.astype(DTYPES[self.dtype])}

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        return self.encode(x)

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        return [Planned(self)] * len(pieces)

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return parts["data"].astype(dtype)

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        return None

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        return {"data": parts["data"][..., :tokens, :]}

    def join(self, pieces: list[Parts]) -> Parts | None:
        return {name: mx.concatenate([p[name] for p in pieces], axis=-2) for name in self.roles}
