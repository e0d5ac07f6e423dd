"""``nsnquant``: normalize, shift, normalize, rotate; then one codebook for every model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, Self

import mlx.core as mx

from vkv.codecs.kernels import cuda as kernels_cuda
from vkv.codecs.kernels.device import on_cpu, on_cuda
from vkv.codecs.nsnquant import codebooks, hadamard, kernels_cpu
from vkv.codecs.nsnquant import transform as nsn
from vkv.codecs.nsnquant.checks import check_values
from vkv.codecs.nsnquant.searchable import searchable
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

#: Elements of one step on a CPU, so that what a step makes stays in its cache.
ENCODE_STEP, DECODE_STEP = 1 << 20, 1 << 18
#: On a GPU a step only bounds memory: about 40 bytes an element.
GPU_STEP = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class NSNQuant:
    """Codes of 8-dim pieces of normalized tokens, window by window.

    For token ``t`` of window ``w``, with ``H`` the normalized Hadamard transform::

        x[t] = s1[t] * (s2[t] * H(code[t]) + o[w])

    With ``x`` of shape ``(B, H, T, D)``, ``n = T / window`` and ``K x V`` for
    ``codebook_size x subvector_dim``:

    =========  =====  ===================  ===========================================
    part       dtype  shape                meaning
    =========  =====  ===================  ===========================================
    codebook   F16    (K, V)               codewords; magnitudes when ``bits`` is 2
    indices    U8     (B, H, T, D/V)       codeword of each piece
    signs      U8     (B, H, T, D/8)       bit set: negative (only ``bits`` 2)
    s2         F16    (B, H, T)            second scale
    s1         F16    (B, H, T)            first scale (``metadata_bits`` 16)
    o          F16    (B, H, n, D)         shift (``metadata_bits`` 16)
    s1         U32    (B, H, n, window/8)  4-bit codes, packed (``metadata_bits`` 4)
    s1_range   F16    (B, H, n, 2)         their scale and minimum
    o          U32    (B, H, n, D/8)       4-bit codes, packed
    o_range    F16    (B, H, n, D/32, 2)   their scale and minimum, of 32 channels
    =========  =====  ===================  ===========================================

    Raises:
        CodecError: An option is out of its range (rule N1).

    Source: NSNQuant, arXiv 2505.18231; ``spec/v1/codecs/nsnquant.md``.
    """

    id: ClassVar[str] = "nsnquant"
    version: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits()
    roles: ClassVar[dict[str, str]] = {
        "codebook": "table",
        "indices": "payload",
        "signs": "payload",
        "s2": "metadata",
        "s1": "metadata",
        "s1_range": "metadata",
        "o": "metadata",
        "o_range": "metadata",
    }
    refit_interval: ClassVar[int] = 0
    examples: ClassVar[tuple[str, ...]] = (
        "nsnquant:bits=2",
        "nsnquant:bits=1,window=128",
        "nsnquant:bits=2,match=cosine,metadata_bits=16,pre_rope=false",
    )

    bits: int = option(
        2,
        "Payload bits per element at subvector_dim=8; 2: signs and magnitudes.",
        choices=(2, 1),
    )
    window: int = option(64, "Tokens that share a shift.", low=2, high=1 << 16)
    metadata_bits: int = option(4, "Bits of each first scale and shift.", choices=(4, 16))
    codebook_size: int = option(256, "Codewords.", low=2, high=256)
    subvector_dim: int = option(8, "Channels of a codeword.", choices=(4, 8, 16))
    pre_rope: bool = option(
        True, "Store keys without their rotary embedding.", choices=(True, False)
    )
    match: str = option(
        "euclidean",
        "How codewords are trained and chosen; matters to the encoder alone.",
        choices=("euclidean", "cosine"),
    )
    fit: str = option(
        "project",
        "How first scales and shifts are chosen. nsn, as in the paper: the length of a token, and "
        "the mean. project: how much of the mean direction a token holds, and the least squares "
        "fit. Matters to the encoder alone.",
        choices=("project", "nsn"),
    )
    fold: str = option(
        "norm",
        "What the second scale is corrected for after coding: the norm of the token, the least "
        "squared error, or an error orthogonal to the token. Matters to the encoder alone.",
        choices=("norm", "least", "orthogonal"),
    )
    seed: int = option(
        1234,
        "Seed of the codebook's training; matters to the encoder alone.",
        high=(1 << 63) - 1,
    )

    def __post_init__(self) -> None:
        check_options(self, "N1")

    @classmethod
    def configure(cls, options: Options, tensor: str, dtype: str) -> Self:
        if options.get("match") == "cosine":
            options = {"fit": "nsn", **options}
        if tensor != "keys":
            options = {**options, "pre_rope": False}
        return cls(**options)  # type: ignore[arg-type]  # checked when built

    @property
    def min_tokens(self) -> int:
        return self.window

    def for_rotated_keys(self) -> Self:
        return replace(self, pre_rope=False)

    def refuses(self, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
        if NAMES.get(dtype) not in FLOATS:
            return f"dtype {dtype} is not F16, BF16 or F32"
        if len(shape) != 4:
            return f"shape {shape} is not (B, H, T, D)"
        dim = shape[-1]
        if hadamard.order(dim) is None:
            return f"head dim {dim} is not m * 2^k with m in {hadamard.ORDERS}"
        multiple = max(nsn.GROUP if self.metadata_bits == 4 else 8, self.subvector_dim)
        if dim % multiple:
            return f"head dim {dim} is not a multiple of {multiple}"
        return None

    def span(self, tokens: int, start: int) -> tuple[int, int]:
        return 0, tokens - tokens % self.window

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return dtype and shape of each part for an ``x`` of the given shape (rule N2)."""
        if reason := self.refuses(shape, mx.float32):
            raise CodecError(reason, rule="N2", at="nsnquant")
        *lead, tokens, dim = shape
        if tokens % self.window or not prod(shape):
            raise CodecError(
                f"shape {shape}, expected sizes above 0, and tokens in windows of {self.window}",
                rule="N2",
                at="nsnquant",
            )
        rows, windows = (*lead, tokens), (*lead, tokens // self.window)
        return (
            {"codebook": ("F16", (self.codebook_size, self.subvector_dim))}
            | {"indices": ("U8", (*rows, dim // self.subvector_dim)), "s2": ("F16", rows)}
            | ({"signs": ("U8", (*rows, dim // 8))} if self.bits == 2 else {})
            | nsn.metadata_layout(self.metadata_bits, self.window, rows, windows, dim)
        )

    def validate(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Check form (K3), finite scalars and codewords (N3), indices in range (N4)."""
        check_layout(self, parts, shape)
        if prod(shape):
            check_values(parts, self.codebook_size)

    def encode(self, x: mx.array) -> Parts:
        """Encode whole windows; their bits do not depend on how many one call carries.

        Raises:
            CodecError: The shape is refused (N2), or a value is (N3).
        """
        layout = self.layout(x.shape)
        rows, search = searchable(self.spec)
        steps = self._prepared(x.reshape(-1, self.window, x.shape[-1]), search.magnitude)
        done, ready = [], next(steps)
        while ready is not None:
            coming = next(steps, None)  # MLX works on it while this thread searches
            done.append(nsn.code(ready, rows, search, self.fold))
            mx.async_eval(done[-1])  # type: ignore[no-untyped-call]
            ready = coming
        return {"codebook": rows.astype(mx.float16)} | {
            name: mx.concatenate([parts[name] for parts in done]).reshape(layout[name][1])
            for name in done[0]
        }

    def encode_after(self, x: mx.array, earlier: Parts) -> Parts:
        return self.encode(x)

    def plan(
        self, pieces: Sequence[Piece], overhead: int, *, force: bool = False
    ) -> Sequence[Planned]:
        return [Planned(self)] * len(pieces)

    def _prepared(self, windows: mx.array, signs: bool) -> Iterator[nsn.Prepared | None]:
        step = _step(ENCODE_STEP, windows[0].size)
        for i in range(0, len(windows), step):
            ready = nsn.prepare(
                windows[i : i + step], signs=signs, fine=self.metadata_bits == 16, fit=self.fit
            )
            mx.async_eval(ready.z, ready.norms)  # type: ignore[no-untyped-call]
            yield ready

    @property
    def spec(self) -> codebooks.Spec:
        """Return the codebook that the encoder uses."""
        return codebooks.Spec(
            magnitude=self.bits == 2,
            cosine=self.match == "cosine",
            size=self.codebook_size,
            dim=self.subvector_dim,
            seed=self.seed,
        )

    def decode(self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        dim = shape[-1]
        count = prod(shape) // (self.window * dim)
        flat = {n: part.reshape(count, -1) for n, part in parts.items() if n != "codebook"}
        if on_cpu() and kernels_cpu.fits(dim, self.subvector_dim):
            scales = nsn.metadata(flat, window=self.window, dim=dim)
            return kernels_cpu.decode(parts, *scales, shape, dtype)
        fused = self.decode_fused(parts, shape, dtype, ALONE)
        if fused is not None:
            return fused
        rows = parts["codebook"].astype(mx.float32)
        return self.plain(flat, rows, dim, dtype).reshape(shape)

    def decode_fused(
        self, parts: Parts, shape: tuple[int, ...], dtype: mx.Dtype, context: FusedContext
    ) -> mx.array | None:
        if not on_cuda():
            return None
        return kernels_cuda.nsnquant(parts, shape, dtype, self.window, context)

    def plain(self, flat: Parts, codebook: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        """Decode with plain MLX operations, a bounded number of windows at a time."""
        count = len(flat["s2"])
        decode = partial(nsn.decode, codebook=codebook, window=self.window, dim=dim, dtype=dtype)
        step = _step(DECODE_STEP, self.window * dim)
        windows = []
        for i in range(0, count, step):
            windows.append(decode({n: part[i : i + step] for n, part in flat.items()}))
            mx.async_eval(windows[-1])  # type: ignore[no-untyped-call]  # a step at a time
        return mx.concatenate(windows)

    def prefix(self, parts: Parts, shape: tuple[int, ...], tokens: int) -> Parts | None:
        if tokens % self.window:
            return None
        return self.select(parts, 0, tokens // self.window)

    def select(self, parts: Parts, start: int, stop: int) -> Parts:
        """Return parts of windows ``start`` to ``stop - 1``."""
        per_token = {"indices", "signs", "s2"} | ({"s1"} if self.metadata_bits == 16 else set())
        out = dict(parts)
        for name in parts.keys() - {"codebook"}:
            unit = self.window if name in per_token else 1
            out[name] = parts[name][:, :, start * unit : stop * unit]
        return out

    def join(self, pieces: list[Parts]) -> Parts | None:
        """Return parts of consecutive segments as those of one; ``None`` if codebooks differ."""
        first = pieces[0]["codebook"]
        if not all(mx.array_equal(parts["codebook"], first) for parts in pieces[1:]):
            return None
        names = pieces[0].keys() - {"codebook"}
        joined = {n: mx.concatenate([p[n] for p in pieces], axis=2) for n in sorted(names)}
        return {"codebook": first} | joined


def _step(elements: int, window: int) -> int:
    """Return the number of windows of one step."""
    if not on_cpu():
        elements = GPU_STEP
    return max(1, elements // window)
