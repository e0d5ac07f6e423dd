"""Make, store and read the integers of ``tc``, and turn them back to values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs.protocol import Parts
from vkv.codecs.tc import basis as tc_basis
from vkv.codecs.tc import entropy as tc_entropy
from vkv.codecs.tc.basis import F32, Basis
from vkv.errors import CodecError
from vkv.format.dtypes import F16_MAX

U8 = npt.NDArray[np.uint8]

#: Marks a component that is zero throughout.
NONE = 255
#: Most chunks: enough to tell variances apart, and ``NONE`` stays free.
MAX_CHUNKS = 200
#: Elements that a tensor may have for nothing, and for each byte stored (.03 bits an element).
FREE, PER_BYTE = 1 << 24, 1 << 8
#: Multiplications for nothing, and for each byte stored beside the basis: some 2,000 are usual.
FREE_WORK, WORK_PER_BYTE = 1 << 22, 1 << 14


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parsed parts of a segment; the integers themselves stay coded.

    ``chunk`` and ``factor`` have one entry for each of the G*R components; ``basis`` is
    ``None`` where the components are the channels.
    """

    step: np.float32
    width: int
    chunk: U8
    factor: U8
    basis: Basis | None
    coded: bytes

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """Return the components that have integers, in stored order."""
        used = np.flatnonzero(self.chunk != NONE)
        return used[np.argsort(self.chunk[used], kind="stable")]

    def sizes(self) -> list[int]:
        """Return the number of components of each chunk."""
        return [int(n) for n in np.bincount(self.chunk[self.chunk != NONE])]


def flat(x: mx.array) -> F32:
    """Flatten ``(B, H, T, D)`` to tokens (B*T, H*D), F32."""
    wide = x.astype(mx.float32).swapaxes(1, 2)
    return np.array(wide).reshape(-1, x.shape[1] * x.shape[3])


def centred(x: mx.array) -> tuple[F32, npt.NDArray[np.float16]]:
    """Split tokens (B*T, H*D) into their mean, as it is stored, and the rest.

    Raises:
        CodecError: A value is not finite (T3).
    """
    z = flat(x)
    if not np.isfinite(z).all():
        raise CodecError("found inf or NaN, expected finite values", rule="T3", at="tc")
    mean = z.mean(0, dtype=np.float64).clip(-F16_MAX, F16_MAX).astype(np.float16)
    return z - mean.astype(np.float32), mean


def deviation(z: F32) -> float:
    """Return the root of the mean variance of the columns of (N, n); 1 where there is none."""
    return float(np.sqrt(z.var(0, dtype=np.float64).mean())) or 1.0


def quantize(z: F32, basis: Basis | None, heads: int, step: float) -> Parts:
    """Quantize tokens (N, n) without their mean to the parts ``codes`` and ``components``."""
    groups = 1 if basis is None else len(basis.ints)
    pools = tc_basis.pools(z, heads, "head" if groups > 1 else "joint")
    y = np.concatenate([_components(pools[g], basis, g) for g in range(groups)])
    q = np.rint(y / np.float32(step))
    top = float(np.abs(q).max(initial=0))
    if top > np.iinfo(np.int32).max - 128:
        raise CodecError(
            f"integers up to {top:.3g}, expected at most 2^31: the step is too small",
            rule="T4",
            at="tc.step",
        )
    # the best value of a bin is not its middle where the density falls off
    ratio = (y * q).sum(1) / np.maximum((q * q).sum(1), 1) / np.float32(step)
    factor = np.clip(np.rint(ratio * 256) - 128, 0, 255).astype(np.uint8)
    chunk = assign((q * q).sum(1), len(z))
    width = 2 if top < 1 << 15 else 4
    blocks = Blocks(np.float32(step), width, chunk, factor, basis, b"")
    return {
        "codes": _codes(blocks, q[blocks.order].astype(f"i{width}")),
        "components": mx.array(np.stack([chunk, factor], 1)),
    }


def _components(z: F32, basis: Basis | None, group: int) -> F32:
    return z.T if basis is None else (z @ tc_basis.analysis(basis.rows[group])).T


def assign(energy: F32, tokens: int) -> U8:
    """Assign components to chunks: like energies together, 16,384 symbols or more."""
    order = np.argsort(-energy, kind="stable")
    order = order[energy[order] > 0]
    each = max(-(-tc_entropy.CHUNK // tokens), -(-len(order) // MAX_CHUNKS))
    place = np.arange(len(order)) // each
    if place.size and place[-1] and (place == place[-1]).sum() * 2 < each:
        place[place == place[-1]] -= 1
    chunk = np.full(len(energy), NONE, np.uint8)
    chunk[order] = place
    return chunk


def _codes(blocks: Blocks, q: tc_entropy.Ints) -> mx.array:
    bounds = np.cumsum([0, *blocks.sizes()])
    pieces = [q[a:b] for a, b in pairwise(bounds)]
    head = blocks.step.astype("<f4").tobytes() + blocks.width.to_bytes(4, "little")
    return mx.array(np.frombuffer(head + tc_entropy.pack(pieces), np.uint8))


def read(parts: Parts, shape: tuple[int, ...]) -> Blocks:
    """Parse and check everything but the inside of the chunks of integers (T6 to T12, T20 on)."""
    batch, heads, tokens, dim = shape
    stored = sum(p.nbytes for p in parts.values())
    if prod(shape) > FREE + PER_BYTE * stored:
        raise CodecError(
            f"{prod(shape)} elements in {stored} bytes, expected at most "
            f"{FREE} + {PER_BYTE} a byte",
            rule="T6",
            at="tc",
        )
    table = tc_basis.raw(parts["basis"])
    basis = tc_basis.load(table, heads, dim, batch * tokens) if table else None
    count = heads * dim if basis is None else basis.scale.size
    components, codes = np.array(parts["components"]), tc_basis.raw(parts["codes"])
    chunk = components[:, 0]
    numbers = np.unique(chunk[chunk != NONE])
    if len(chunk) != count or numbers.tolist() != list(range(len(numbers))):
        raise CodecError(
            f"{len(chunk)} components in chunks {numbers.tolist()}, expected {count} in chunks "
            "counted from 0",
            rule="T7",
            at="components",
        )
    used = 0 if basis is None else int((chunk != NONE).sum()) // len(basis.ints)
    own = stored - len(table)
    if prod(shape) * used > FREE_WORK + WORK_PER_BYTE * own:
        raise CodecError(
            f"{prod(shape)} elements of {used} components each in {own} bytes, expected at most "
            f"{FREE_WORK} + {WORK_PER_BYTE} products a byte",
            rule="T6",
            at="components",
        )
    step, width = np.frombuffer(codes[:4].ljust(4, b"\xff"), "<f4")[0], codes[4:8]
    blocks = Blocks(
        step, int.from_bytes(width, "little"), chunk, components[:, 1], basis, codes[8:]
    )
    if len(codes) < 8 or not np.isfinite(step) or blocks.width not in tc_entropy.WIDTHS:
        raise CodecError(
            f"step {step} and width {blocks.width}, expected a finite one and 2 or 4",
            rule="T8",
            at="codes",
        )
    tc_entropy.split(blocks.coded, len(blocks.sizes()), "codes")
    return blocks


def integers(blocks: Blocks, tokens: int) -> tc_entropy.Ints:
    """Decode the integers (components, tokens) in stored order.

    Raises:
        CodecError: A chunk does not hold as many (T13).
    """
    sizes = blocks.sizes()
    q = np.empty((sum(sizes), tokens), f"i{blocks.width}")
    bounds = np.cumsum([0, *sizes])
    flat = [q[a:b].reshape(-1) for a, b in pairwise(bounds)]
    tc_entropy.unpack(blocks.coded, flat, "codes")
    return q


@np.errstate(over="ignore", invalid="ignore")  # forged scales may overflow, as in MLX
def dequantize(blocks: Blocks, mean: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Turn integers to values ``(B, H, T, D)``, F32 (rule T9)."""
    batch, heads, tokens, dim = shape
    order, q = blocks.order, integers(blocks, batch * tokens)
    gain = blocks.step * ((np.float32(128) + blocks.factor[order]) / np.float32(256))
    if blocks.basis is None:
        flat = np.zeros((heads * dim, batch * tokens), np.float32)
        flat[order] = q * gain[:, None]
        x = mx.array(flat).reshape(heads, dim, -1).swapaxes(1, 2)
    else:
        x = _synthesis(q, gain, order, blocks.basis, heads)
    x = x + mean.astype(mx.float32)[:, None]
    return x.reshape(heads, batch, tokens, dim).swapaxes(0, 1)


def _synthesis(
    q: tc_entropy.Ints, gain: F32, order: npt.NDArray[np.intp], basis: Basis, heads: int
) -> mx.array:
    """Sum rows, (H, N, D)."""
    # on a CPU NumPy multiplies 20 times as fast as MLX, and the integers are there already
    lib: Any = np if mx.default_device() == mx.Device(mx.cpu) else mx
    groups, count, columns = basis.ints.shape
    # of the rows in use alone: a segment of few tokens may share a large basis
    scale = basis.scale.reshape(-1)[order] * gain
    rows = basis.ints.reshape(-1, columns)[order] * scale[:, None]
    y = lib.array(q).astype(lib.float32)
    if groups == 1:
        pairs = [(y, part) for part in np.split(rows, heads, axis=1)]
    else:
        own = [np.flatnonzero(order // max(count, 1) == h) for h in range(heads)]
        pairs = [(y[lib.array(i)], rows[i]) for i in own]
    return mx.stack([mx.array(q.T @ lib.array(part)) for q, part in pairs])


def cut(blocks: Blocks, shape: tuple[int, ...], tokens: int) -> mx.array:
    """Code the integers of the first ``tokens`` tokens anew: their part ``codes``."""
    batch, _, before, _ = shape
    whole = integers(blocks, batch * before).reshape(-1, batch, before)
    return _codes(blocks, whole[..., :tokens].reshape(len(whole), -1))
