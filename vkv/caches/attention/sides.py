"""Tell the CUDA kernels what they need of keys or values in each codec."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vkv.caches.attention.past import Past
from vkv.codecs.affine import Affine
from vkv.codecs.nsnquant.codec import NSNQuant
from vkv.format.schema import Rope

__all__ = ["WARPS", "Side", "Template", "room", "side", "stage", "unknown"]

#: Warps of a block.
WARPS = 4
#: Bytes of a codebook of ``nsnquant`` in shared memory.
BOOK = 4096

Template = list[tuple[str, Any]]


class Side(NamedTuple):
    """Keys or values, as a kernel takes them.

    Attributes:
        files: Kernel sources beside the common ones.
        declaration: C++ that makes ``keys`` or ``values`` from the inputs.
        parts: Name of each input and of the part that it is.
        constants: Further inputs.
        template: Compile-time constants.
        stage: Bytes of a unit of tokens in shared memory.
        tables: Bytes beside them.
        planes: Sums that a channel of values needs: 2 where a rotation is left for the end.
    """

    files: tuple[str, ...]
    declaration: str
    parts: tuple[tuple[str, str], ...]
    constants: dict[str, mx.array]
    template: Template
    stage: int
    tables: int = 0
    planes: int = 1


def unknown(past: Past, name: str) -> str | None:
    """Say why the kernels cannot take this codec, or ``None``.

    Args:
        past: Keys or values.
        name: ``"keys"`` or ``"values"``.
    """
    codec, dim, rope = past.codec, past.tail.shape[-1], past.rope
    if past.tail.dtype not in (mx.float16, mx.bfloat16):
        return f"{name} of {past.tail.dtype}, expected float16 or bfloat16"
    if isinstance(codec, Affine):
        return None if rope is None else f"{name} of affine without their rope"
    if not isinstance(codec, NSNQuant):
        return f"{name} of {codec.id}"
    if codec.metadata_bits != 4 or codec.subvector_dim != 8 or codec.window % 16 or dim == 96:
        return f"{name} of nsnquant with other than the default sizes"
    if rope is not None and (rope.traditional or rope.dims != dim):
        return f"{name} of nsnquant with a rope of {rope.dims} of {dim} channels"
    return None


def room(size: int) -> int:
    """Count the bytes that ``size`` bytes need where copies are of whole, aligned 16 bytes."""
    return (size + 31) // 16 * 16


def stage(past: Past, unit: int) -> int:
    """Count the bytes of ``unit`` tokens in shared memory."""
    dim, codec = past.tail.shape[-1], past.codec
    if isinstance(codec, Affine):
        meta = dim // codec.group * past.parts["scales"].dtype.size
        return room(unit * dim * codec.bits // 8) + 2 * room(unit * meta)
    assert isinstance(codec, NSNQuant)
    return codec.bits * room(unit * dim // 8) + room(unit * 2)


def side(name: str, past: Past, unit: int, tiles: int, copies: int, shared: bool) -> Side:
    """Describe ``past`` to a kernel.

    Args:
        name: ``"keys"`` or ``"values"``.
        past: What ``unknown`` says ``None`` of.
        unit: Tokens that a warp takes at a time.
        tiles: Tiles of 8 query columns of a block.
        copies: Of a codebook in shared memory.
        shared: Keys and values are both of ``nsnquant``, with one codebook.
    """
    if isinstance(past.codec, Affine):
        return _affine(name, past, past.codec, unit)
    assert isinstance(past.codec, NSNQuant)
    if name == "keys":
        return _nsnquant_keys(past, past.codec, unit, tiles, copies)
    return _nsnquant_values(past, past.codec, unit, copies, shared)


def _affine(name: str, past: Past, codec: Affine, unit: int) -> Side:
    letter = name[0].upper()
    parts = tuple((f"{name}_{part}", part) for part in ("codes", "scales", "biases"))
    template: Template = [(f"{letter}BITS", codec.bits), (f"{letter}GROUP", codec.group)]
    template.append((f"{letter}SCALE", past.parts["scales"].dtype))
    kind = "AffineKeys" if name == "keys" else "AffineValues"
    text = (
        f"const int {name}_coded = {name}_codes_shape[2];"
        f"vkv::{kind}<D, {letter}BITS, {letter}GROUP, {letter}SCALE, NT> {name}("
        f"{', '.join(n for n, _ in parts)}, row * {name}_coded);"
    )
    return Side(("codes.cuh", "affine.cuh"), text, parts, {}, template, stage(past, unit))


def _nsnquant_keys(past: Past, codec: NSNQuant, unit: int, tiles: int, copies: int) -> Side:
    dim = past.tail.shape[-1]
    if past.rope is None:
        text = f"NsnKeys<D, KWINDOW, KSIGNS, UNIT, {copies}, NT> keys("
        tables = copies * BOOK + 32 * tiles * dim
        return _nsnquant("keys", codec, text, {}, stage(past, unit), tables, 1)
    turns, frequencies = _turns(past.rope, dim, unit)
    text = f"NsnTurnedKeys<D, KWINDOW, KSIGNS, UNIT, {copies}, NT> keys("
    text += "turns, frequencies, numbers[2], head, "
    tables = copies * BOOK + unit * (2 * dim + 32) + 32 * tiles * (dim + 16) + WARPS * 6 * dim
    constants = {"turns": turns, "frequencies": frequencies}
    return _nsnquant("keys", codec, text, constants, stage(past, unit), tables, 1)


def _nsnquant_values(past: Past, codec: NSNQuant, unit: int, copies: int, shared: bool) -> Side:
    share = "true" if shared else "false"
    text = f"NsnValues<D, VWINDOW, VSIGNS, UNIT, {copies}, NT, {share}> values("
    tables = 0 if shared else copies * BOOK
    return _nsnquant("values", codec, text, {}, stage(past, unit), tables, 2)


def _nsnquant(
    name: str,
    codec: NSNQuant,
    text: str,
    constants: dict[str, mx.array],
    size: int,
    tables: int,
    planes: int,
) -> Side:
    letter = name[0].upper()
    order = ["indices", "signs", "s2", "s1", "o", "s1_range", "o_range", "codebook"]
    names = [f"{name}_{part}" for part in order]
    if codec.bits == 1:
        names.pop(1), order.pop(1)
    inputs = names if codec.bits == 2 else [names[0], *names]  # signs, which nothing reads
    template: Template = [(f"{letter}WINDOW", codec.window), (f"{letter}SIGNS", codec.bits == 2)]
    text = (
        f"const int {name}_coded = {name}_indices_shape[2]; vkv::{text}{', '.join(inputs)},"
        f" {name}_codebook_shape[0], row, {name}_coded);"
    )
    parts = tuple(zip(names, order, strict=True))
    files = ("nsnquant.cuh", "nsnquant_keys.cuh")
    return Side(files, text, parts, constants, template, size, tables, planes)


@lru_cache(maxsize=32)
def _turns(rope: Rope, dim: int, unit: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines of ``unit`` positions, as ``NsnTurnedKeys`` has channels; frequencies."""
    half = np.arange(dim // 2, dtype=np.float32) / np.float32(dim // 2)
    if rope.freqs is None:
        frequencies = np.exp2(-half * np.float32(math.log2(rope.base or 1.0)))
    else:
        frequencies = 1 / np.array(rope.freqs, np.float32)
    j, t, e = np.ogrid[: dim // 16, :4, :2]
    channel = e | (t & 1) << 1 | j << 2 | (t >> 1) * (dim // 4)
    angles = np.arange(unit)[:, None, None, None] * (frequencies[channel] * rope.scale)
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=3).astype(np.float16)
    arrays = mx.array(turns), mx.array(frequencies.astype(np.float32))
    mx.eval(arrays)
    return arrays
