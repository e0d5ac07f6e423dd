"""``tc``: transform coding, for files that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import mlx.core as mx

from vkv.codecs.options import check_options, option
from vkv.codecs.protocol import (
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
from vkv.codecs.raw import Raw
from vkv.codecs.tc import blocks as tc_blocks
from vkv.codecs.tc import rate_plan
from vkv.codecs.tc.coder import Coded, Coder, solve
from vkv.errors import CodecError
from vkv.format.dtypes import FLOATS

#: Some 2.3 bits.
STEP = 0.6
#: Step of values over that of keys: at equal bits it hurts the model least.
VALUES = 0.5
#: Fewer tokens are not worth their tables.
MIN_TOKENS = 64
#: An array of bytes that is a basis (``tc_basis``).
BasisBytes = mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class Tc:
    """Integers on principal axes, entropy-coded.

    For token ``t``, with the ``n = H * D`` channels of all heads in one row (or of each
    head in a row of its own)::

        x[t] = mean + sum over j of (step * factor[j] * q[j, t]) * basis[j]

    With ``x`` of shape ``(B, H, T, D)``, G groups of R components:

    ==========  =====  ========  ===================================================
    part        dtype  shape     meaning
    ==========  =====  ========  ===================================================
    codes       U8     (bytes,)  step F32, width of q U32 (2 or 4), then the chunks
    components  U8     (G*R, 2)  chunk of each component (255: none) and its factor
    mean        F16    (H, D)    mean over the tokens
    basis       U8     (bytes,)  the axes (``tc_basis``); empty: the channels
    ==========  =====  ========  ===================================================

    Raises:
        CodecError: An option is out of its range (rule T1).

    Source: KVTC, arXiv 2511.01815; ``spec/v1/codecs/tc.md``.
    """

    id: ClassVar[str] = "tc"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(
        plans=True, takes_basis=True, expensive_part="basis", decode_validates=True
    )
    roles: ClassVar[dict[str, str]] = {
        "codes": "payload",
        "components": "metadata",
        "mean": "metadata",
        "basis": "table",
    }
    examples: ClassVar[tuple[str, ...]] = tuple(
        f"tc:bits={bits}" for bits in ("1", "1.4", "1.7", "2", "2.3", "3", "4")
    )
    window: ClassVar[int] = 1
    min_tokens: ClassVar[int] = MIN_TOKENS
    refit_interval: ClassVar[int] = 0

    step: float = option(
        STEP,
        "Step of the integers, in deviations of the tensor about its channel means; with a basis, "
        "in units of its rows. What is given is halved for values.",
        low=1e-6,
        high=1e6,
    )
    bits: float = option(
        0.0,
        "Bits per element of the whole file, for which the steps are found; 0: step is given.",
        low=0.0,
        high=16.0,
    )
    axes: str = option(
        "auto",
        "Axes over all KV heads (joint), of each head, none, or the cheapest of these (auto).",
        choices=("auto", "none", "head", "joint"),
    )
    n_sink: int = option(4, "Leading tokens that are kept raw.", high=1 << 16)
    tail: int = option(0, "Last tokens that are kept raw.", high=1 << 16)
    pre_rope: bool = option(
        True, "Store keys without their rotary embedding.", choices=(True, False)
    )

    def __post_init__(self) -> None:
        check_options(self, "T1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        if tensor != "keys":
            step = float(options.get("step", STEP)) * VALUES
            options = {**options, "pre_rope": False, "step": step}
        numbers = {n: float(v) for n, v in options.items() if n in ("step", "bits")}
        return cls(**{**options, **numbers})  # type: ignore[arg-type]  # checked when built

    def plan(
        self,
        pieces: Sequence[Piece],
        overhead: int = 0,
        *,
        force: bool = False,
        weights_of: Sequence[float] | None = None,
    ) -> list[Planned]:
        """Choose a step for each tensor, so that together they hurt the model least.

        Args:
            pieces: The tensors of all layers.
            overhead: Bytes of the file that are not in the tensors.
            force: Also where header and sinks leave too little of ``bits`` for the values.
            weights_of: As ``rate_plan.plan`` takes them.

        Raises:
            CodecError: They do, and it is not forced; or a value is not finite (T3).
        """
        spans = [self.span(p.x.shape[-2], p.start) for p in pieces]
        rate = rate_plan.Rate(self.bits, self.step, self.axes, force)
        allocated = rate_plan.plan(pieces, spans, rate, weights_of=weights_of, overhead=overhead)
        return [self._planned(*each) for each in zip(pieces, allocated, strict=True)]

    def _planned(self, piece: Piece, allocated: rate_plan.Allocated) -> Planned:
        if allocated.parts is None:
            return Planned(Raw(dtype=NAMES[piece.x.dtype]), None, allocated.note)
        pre_rope = self.pre_rope and piece.keys
        codec = replace(self, step=allocated.step, pre_rope=pre_rope)
        return Planned(codec, allocated.parts)

    def for_rotated_keys(self) -> Self:
        return replace(self, pre_rope=False)

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        if NAMES.get(dtype) not in FLOATS:
            return f"dtype {dtype} is not F16, BF16 or F32"
        if len(shape) != 4:
            return f"shape {shape} is not (B, H, T, D)"
        return None

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        lead = min(self.n_sink, tokens) if start == 0 else 0
        body = tokens - lead - self.tail
        return (lead, body) if body >= MIN_TOKENS else (0, 0)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each part for an ``x`` of the given shape (rule T2)."""
        if len(shape) != 4 or not prod(shape):
            raise CodecError(
                f"shape {shape}, expected (B, H, T, D) with sizes above 0", rule="T2", at="tc"
            )
        return {
            "codes": ("U8", (None,)),
            "components": ("U8", (None, 2)),
            "mean": ("F16", (shape[1], shape[3])),
            "basis": ("U8", (None,)),
        }

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form (K3) and all values but those inside the chunks, which ``decode`` checks."""
        self._read(parts, shape)

    def _read(self, parts: Parts, shape: tuple[int, ...]) -> tc_blocks.Blocks:
        check_layout(self, parts, shape)
        if not mx.isfinite(parts["mean"]).all():
            raise CodecError("found inf or NaN, expected finite values", rule="T3", at="mean")
        return tc_blocks.read(parts, shape)

    def encode(self, x: mx.array, basis: BasisBytes | None = None) -> Parts:
        """Encode ``x`` in axes of its own, or in those of ``basis``.

        Raises:
            CodecError: The shape is refused (T2), a value is not finite (T3), the
                integers do not fit (T4), or ``basis`` is broken (T20 on).
        """
        layout = self.layout(x.shape)
        coder = Coder(x, self.axes, basis)
        if self.bits:

            def trial(step: float) -> tuple[float, list[Coded]]:
                coded = coder.code(step)
                return 8 * coded.nbytes, [coded]

            (coded,) = solve(coder.estimate, trial, self.bits * x.size)
        else:
            coded = coder.code(self.step)
        return {name: coded.parts[name] for name in layout}

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        return self.encode(x)

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Decode to an array of ``shape`` and ``dtype``.

        Raises:
            CodecError: A chunk does not hold what it must (T13).
        """
        blocks = self._read(parts, shape)
        return tc_blocks.dequantize(blocks, parts["mean"], shape).astype(dtype)

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        return None

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        """Code the same integers of fewer tokens anew: no error is added."""
        return {**parts, "codes": tc_blocks.cut(tc_blocks.read(parts, shape), shape, tokens)}

    def join(self, pieces: list[Parts]) -> Parts | None:
        return None
