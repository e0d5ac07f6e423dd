"""``kvquant``: non-uniform levels, with the few farthest elements kept exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import mlx.core as mx
import numpy as np

from vkv.codecs.bits import pack
from vkv.codecs.kernels import cuda as kernels_cuda
from vkv.codecs.kernels.device import on_cuda
from vkv.codecs.kvquant import fitting as fit
from vkv.codecs.kvquant import levels as nuq
from vkv.codecs.kvquant import outliers
from vkv.codecs.kvquant.checks import check_values, floats
from vkv.codecs.kvquant.layout import parts_layout
from vkv.codecs.options import check_options, option
from vkv.codecs.protocol import (
    ALONE,
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

#: Outliers are placed by 32-bit integers.
MAX_ELEMENTS = (1 << 31) - 1
#: Tokens per level that a fit needs. Of levels frozen on fewer, later keys leave the
#: range so often that their outliers cost more than the codes.
TOKENS_PER_LEVEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KvQuant:
    """Codes that index ``L = 2**bits`` fitted levels; the outliers apart in float16.

    With ``c = codes[b, h, t, d]``, what is not an outlier is::

        table="channel"   x = levels[b, h, d, c]
        table="token"     x = levels[b, h, t, c]
        table="shared"    x = s * (levels[c] + offsets[b, h, t] / 64)
                          s = 2**(scales // 8 - 15) * (1 + scales % 8 / 8); 0 if scales = 0

    For ``x`` of shape ``(B, H, T, D)`` (batch, KV heads, tokens, head dim):

    ========  =====  ====================  ==================================
    part      dtype  shape                 meaning
    ========  =====  ====================  ==================================
    codes     U32    (B, H, T, W)          packed, low bits first, a row a token
    levels    F16    (B, H, D, L)          table="channel": ascending
    levels    F16    (B, H, T, L)          table="token": ascending
    levels    F16    (L,)                  table="shared": ascending
    bounds    F16    (B, H, D, 2)          table="channel": later tokens outside are outliers
    scales    U8     (B, H, T)             table="shared": as above
    offsets   I8     (B, H, T)             table="shared": as above
    gaps      U8     (any,)                where the outliers are (``vkv.codecs.kvquant.outliers``)
    outliers  F16    (any,)                their values
    ========  =====  ====================  ==================================

    With ``outlier_fraction`` 0 there are no ``bounds``, ``gaps`` and ``outliers``.

    Raises:
        CodecError: An option is out of its range (rule Q1).

    Source: KVQuant, arXiv 2401.18079; ``spec/v1/codecs/kvquant.md``.
    """

    id: ClassVar[str] = "kvquant"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(reuses_tables=True)
    roles: ClassVar[dict[str, str]] = {
        "codes": "payload",
        "levels": "table",
        "bounds": "table",
        "scales": "metadata",
        "offsets": "metadata",
        "gaps": "outlier",
        "outliers": "outlier",
    }
    window: ClassVar[int] = 1
    examples: ClassVar[tuple[str, ...]] = (
        "kvquant:bits=2",
        "kvquant:bits=3",
        "kvquant:bits=4",
        "kvquant:bits=3,table=token,selection=magnitude,pre_rope=false",
    )

    bits: int = option(3, "Bits per code.", choices=(2, 3, 4))
    table: str = option(
        "channel",
        "What has levels of its own: each channel (always so for keys), each token, or all share "
        "one table.",
        choices=("channel", "shared", "token"),
    )
    outlier_fraction: float = option(
        0.01,
        "Share kept exactly, of each channel (table=channel) or of each token over all heads, to "
        "the nearest whole number.",
        low=0.0,
        below=0.5,
    )
    selection: str = option(
        "two_sided",
        "Which elements are outliers. two_sided: the farthest from the mean (of the channel, or "
        "of the token in its head). magnitude: the largest.",
        choices=("two_sided", "magnitude"),
    )
    lloyd_iters: int = option(8, "Sweeps of the fit.", high=100)
    refit_interval: int = option(
        0,
        "Tokens after which a live cache fits new key levels; 0: never.",
        high=(1 << 31) - 1,
    )
    n_sink: int = option(
        1,
        "Leading tokens of the sequence that are stored raw and left out of every fit.",
        high=(1 << 31) - 1,
    )
    pre_rope: bool = option(
        True, "Store keys without their rotary embedding.", choices=(False, True)
    )

    def __post_init__(self) -> None:
        check_options(self, "Q1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        """Build with a table per channel for keys, and the ``table`` asked for otherwise."""
        asked = cls(**{"table": "shared", **options})  # type: ignore[arg-type]  # checked when built
        return replace(asked, **({"table": "channel"} if tensor == "keys" else {"pre_rope": False}))

    @property
    def levels(self) -> int:
        """Return ``L``, the number of levels of one table."""
        return 1 << self.bits

    @property
    def min_tokens(self) -> int:
        """Return the tokens that a fit needs; a segment that reuses tables needs none."""
        return 1 if self.table == "token" else TOKENS_PER_LEVEL * self.levels

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the parts that later segments reuse."""
        if self.table == "token":
            return ()
        return ("levels", "bounds") if self.table == "channel" and self.sparse else ("levels",)

    @property
    def sparse(self) -> bool:
        """Return whether there are outliers."""
        return self.outlier_fraction > 0

    def for_rotated_keys(self) -> Self:
        return replace(self, pre_rope=False)

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        if NAMES.get(dtype) not in FLOATS:
            return f"dtype {dtype} is not F16, BF16 or F32"
        if len(shape) != 4:
            return f"shape {shape} is not (B, H, T, D)"
        if not 0 < prod(shape) <= MAX_ELEMENTS:
            return f"{prod(shape)} elements, expected 1 to {MAX_ELEMENTS}"
        return None

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        """Split off the first tokens of a sequence as sinks; fewer than ``min_tokens`` stay raw."""
        lead = min(self.n_sink, tokens) if start == 0 else 0
        return lead, tokens - lead if tokens - lead >= self.min_tokens else 0

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each part for an ``x`` of the given shape (rule Q2)."""
        if reason := self.refuses(shape, mx.float32):
            raise CodecError(reason, rule="Q2", at="kvquant")
        return parts_layout(shape, self.bits, self.table, self.sparse)

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form (K3), levels (Q4), bounds (Q5) and the list of outliers (Q6, Q7)."""
        check_layout(self, parts, shape)
        check_values(parts, shape)

    def encode(self, x: mx.array, importance: mx.array | None = None) -> Parts:
        """Fit, select and code ``x``.

        Args:
            x: ``(B, H, T, D)``, finite, at most 65504 in magnitude.
            importance: Weight of each element's squared error in the fit of the levels
                (the Fisher term of the paper's Eq. 1), not negative, broadcastable to ``x``.

        Raises:
            CodecError: The shape is refused (Q2), or a value does not fit float16 (Q8).
        """
        self.layout(x.shape)
        data, weights = floats(x, "x"), None
        if importance is not None:
            weights = np.broadcast_to(floats(importance, "importance", 0), data.shape)
        how = {"channel": fit.by_channel, "token": fit.by_token, "shared": fit.shared}
        return self._parts(x, how[self.table](data, self._recipe, weights), {})

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        """Code tokens that follow an earlier segment, with its tables.

        Args:
            x: ``(B, H, T, D)``, any number of tokens.
            earlier: Parts of that segment; those named in ``tables`` become parts of this one.

        Raises:
            CodecError: The shape is refused (Q2), or a value does not fit float16 (Q8).
        """
        self.layout(x.shape)
        if self.table == "token":
            return self.encode(x)
        data, levels = floats(x, "x"), np.array(earlier["levels"])
        if self.table == "shared":
            coded = fit.with_levels(data, self._recipe, levels)
        else:
            bounds = np.array(earlier["bounds"]) if self.sparse else None
            coded = fit.with_bounds(data, levels, bounds)
        return self._parts(x, coded, {name: earlier[name] for name in self.tables})

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        return [Planned(self)] * len(pieces)

    @property
    def _recipe(self) -> fit.Recipe:
        centred = self.selection == "two_sided"
        return fit.Recipe(self.levels, self.outlier_fraction, centred, self.lloyd_iters)

    def _parts(self, x: mx.array, coded: fit.Coded, tables: Parts) -> Parts:
        parts = {**tables, **{name: mx.array(part) for name, part in coded.parts.items()}}
        parts["codes"] = pack(mx.array(coded.codes), self.bits)
        if self.sparse:
            parts["gaps"], parts["outliers"] = outliers.pack(coded.mask, x)
        return parts

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        fused = self.decode_fused(parts, shape, dtype, ALONE)
        return self.plain(parts, shape, dtype) if fused is None else fused

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        if not on_cuda():
            return None
        return kernels_cuda.kvquant(parts, shape, dtype, self.bits, self.table, context)

    def plain(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Decode with plain MLX operations."""
        levels = parts["levels"]
        if self.table == "channel":
            dense = nuq.by_channel(parts["codes"], self.bits, levels.astype(dtype), shape)
        else:
            if self.table == "shared":
                levels = nuq.scaled(levels, parts["scales"], parts["offsets"])
            dense = nuq.by_token(parts["codes"], self.bits, levels.astype(dtype), shape)
        return outliers.place(dense, parts["gaps"], parts["outliers"]) if "gaps" in parts else dense

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        first = dict(parts)
        for name in self._by_token & parts.keys():
            first[name] = parts[name][:, :, :tokens]
        if self.sparse:
            elements = shape[0] * shape[1] * tokens * shape[3]
            cut = outliers.prefix(parts["gaps"], parts["outliers"], elements)
            first["gaps"], first["outliers"] = cut
        return first

    def join(self, pieces: list[Parts]) -> Parts | None:
        """Return parts of consecutive segments as those of one; ``None`` if their tables differ."""
        joined = dict(pieces[0])
        for name in self.tables:
            if not all(mx.array_equal(parts[name], joined[name]) for parts in pieces[1:]):
                return None
        for name in self._by_token & joined.keys():
            joined[name] = mx.concatenate([parts[name] for parts in pieces], axis=2)
        if self.sparse:
            lists = [(parts["gaps"], parts["outliers"]) for parts in pieces]
            joined["gaps"], joined["outliers"] = outliers.join(lists)
        return joined

    @property
    def _by_token(self) -> set[str]:
        """Return names of the parts that have a token axis."""
        return {"codes", "scales", "offsets"} | ({"levels"} if self.table == "token" else set())
