"""Check the references inside a header: rules H4, H6, H7, H11, and ropes (H2)."""

from __future__ import annotations

import math
from collections import Counter

from vkv.errors import HeaderError
from vkv.format.dtypes import ITEMSIZE
from vkv.format.layers import (
    external_references,
    layer_at,
    place,
    segments,
    stored_layers,
)
from vkv.format.limits import MAX_FILES, ROPE_RANGE
from vkv.format.schema import ROLES, Header, Layer, Rope, Segment, Stored, Tensor, Tokens


def check_references(header: Header) -> None:
    """Check what a header refers to in itself.

    Raises:
        HeaderError: The first rule that is broken (H2, H4, H6, H7, H11).
    """
    uses: Counter[str] = Counter()
    _check_files(header)
    for name, stored in header.tensors.items():
        if stored.dtype not in ITEMSIZE:
            raise HeaderError(f"unknown dtype {stored.dtype!r}", rule="H2", at=f"tensors.{name}")
        if stored.role not in ROLES:
            raise HeaderError(f"unknown role {stored.role!r}", rule="H2", at=f"tensors.{name}")
    for path, _, tensor, segment in segments(header):
        uses.update(_check_segment(header, path, tensor, segment))
    _check_needs(header)
    _check_checkpoints(header)
    for path, layer in stored_layers(header):
        _check_layer(path, layer)
    uses.update(_check_tables(header))
    if header.tokens is not None:
        uses[_check_tokens(header.tokens, header.tensors)] += 1
    if header.model is not None:
        for index in header.model.ropes:
            _check_rope(index, header, "model.ropes")
        if header.layers and len(header.model.ropes) not in (0, len(header.layers)):
            found = f"{len(header.model.ropes)} entries for {len(header.layers)} layers"
            raise HeaderError(found, rule="H6", at="model.ropes")
    for name, stored in header.tensors.items():
        if uses[name] == 0 or (uses[name] > 1 and stored.role != "table"):
            raise HeaderError(
                f"{uses[name]} uses of a {stored.role}, expected one (of a table: one or more)",
                rule="H6",
                at=f"tensors.{name}",
            )


def _check_tables(header: Header) -> list[str]:
    for name, tensor in header.tables.items():
        stored = header.tensors.get(tensor)
        if stored is None or stored.role != "table":
            found = "not in tensors" if stored is None else f"a {stored.role}"
            raise HeaderError(
                f"{tensor!r} is {found}, expected a table", rule="H6", at=f"tables.{name}"
            )
    return list(header.tables.values())


def _check_files(header: Header) -> None:
    dependencies = external_references(header)
    if dependencies and "files" not in header.needs:
        raise HeaderError(
            "tensors of other files, but needs does not list 'files'",
            rule="H11",
        )
    if len(dependencies) > MAX_FILES:
        found = f"depends on {len(dependencies)} files, the limit is {MAX_FILES}"
        raise HeaderError(found, rule="H11")
    if header.tokens is not None:
        stored = header.tensors.get(header.tokens.tensor)
        if stored is not None and stored.file is not None:
            raise HeaderError(
                "the token ids are in another file, expected in this one", rule="H11", at="tokens"
            )


def _check_needs(header: Header) -> None:
    """Refuse needs that nothing in the file has (H4)."""
    rotated = any(segment.rope is not None for *_, segment in segments(header))
    files, checkpoints = bool(external_references(header)), bool(header.checkpoints)
    for name, used in (("rope", rotated), ("files", files), ("checkpoints", checkpoints)):
        if name in header.needs and not used:
            raise HeaderError(f"lists {name!r}, but nothing needs it", rule="H4", at="needs")


def _check_checkpoints(header: Header) -> None:
    """Check that checkpoints ascend, lie before the end, and belong to layers there are (H14)."""
    if header.checkpoints and "checkpoints" not in header.needs:
        raise HeaderError("checkpoints, but needs does not list 'checkpoints'", rule="H14")
    before = 0
    for i, checkpoint in enumerate(header.checkpoints):
        at, end = f"checkpoints[{i}]", None if header.tokens is None else header.tokens.count
        if not before < checkpoint.tokens or (end is not None and checkpoint.tokens >= end):
            found = f"{checkpoint.tokens} tokens, expected more than {before}"
            below = "" if end is None else f" and less than {end}"
            raise HeaderError(found + below, rule="H14", at=at)
        before = checkpoint.tokens
        if not checkpoint.layers:
            raise HeaderError("has no layers, expected one or more", rule="H14", at=at)
        for path, layer in checkpoint.layers.items():
            there = layer_at(header.layers, place(path))
            if there is None or there.kind != layer.kind or layer.children or there.children:
                kind = "no layer" if there is None else f"a {there.kind}"
                raise HeaderError(
                    f"a {layer.kind} for {kind}, expected the kind of a layer without children",
                    rule="H14",
                    at=f"{at}.{path}",
                )


def _check_segment(header: Header, path: str, tensor: Tensor, segment: Segment) -> list[str]:
    for part, name in segment.parts.items():
        if name not in header.tensors:
            raise HeaderError(
                f"part {part!r} is {name!r}, which is not in tensors", rule="H6", at=path
            )
    if segment.tokens is not None and len(tensor.shape) < 2:
        raise HeaderError(f"counts tokens in a tensor of shape {tensor.shape}", rule="H7", at=path)
    _check_rope(segment.rope, header, path)
    if segment.rope is not None:
        try:
            check_rope(header.ropes[segment.rope], tensor.shape[-1] if tensor.shape else 0)
        except HeaderError as exc:
            raise exc.within(path) from None
    rotated = segment.params.get("pre_rope", segment.rope is not None)
    if rotated is not (segment.rope is not None):
        found = f"pre_rope is {rotated!r}, rope is {segment.rope}".lower()
        raise HeaderError(f"{found}; expected both or neither", rule="H4", at=path)
    if segment.rope is not None and "rope" not in header.needs:
        raise HeaderError("rotated keys, but needs does not list 'rope'", rule="H4", at=path)
    return list(segment.parts.values())


def _check_layer(path: str, layer: Layer) -> None:
    for name, tensor in layer.tensors.items():
        at = f"{path}.{name}"
        if tensor.dtype not in ITEMSIZE:
            raise HeaderError(f"unknown dtype {tensor.dtype!r}", rule="H2", at=at)
        counts = [s.tokens for s in tensor.segments]
        if counts == [None]:
            continue
        total = sum(n for n in counts if n is not None)
        if not counts or None in counts or not tensor.shape[1:] or total != tensor.shape[-2]:
            raise HeaderError(
                f"{len(counts)} segments cover {total} rows of a tensor of shape {tensor.shape}",
                rule="H7",
                at=at,
            )


def _check_tokens(tokens: Tokens, tensors: dict[str, Stored]) -> str:
    stored = tensors.get(tokens.tensor)
    form = stored and (stored.role, stored.dtype, stored.shape)
    if stored is None or form != ("tokens", "U32", (tokens.count,)):
        raise HeaderError(
            f"{tokens.tensor!r} is {form}, expected tokens, U32, {tokens.count} of them",
            rule="H6",
            at="tokens",
        )
    if stored.digest != tokens.digest:
        raise HeaderError("its digest is not that of its tensor", rule="H6", at="tokens")
    return tokens.tensor


def check_rope(rope: Rope, dim: int) -> None:
    """Refuse a rope that ``mx.fast.rope`` cannot apply to ``dim`` channels.

    Numbers are such that no angle of any position leaves float32. A frequency may be
    infinite: it turns nothing.

    Raises:
        HeaderError: Says what was found (H2).
    """
    factors = [rope.scale, rope.mscale, 1.0 if rope.base is None else rope.base]
    low, high = ROPE_RANGE
    if rope.dims % 2 or not 0 < rope.dims <= dim:
        found = f"{rope.dims} dims, expected an even number up to {dim}"
    elif (rope.base is None) == (rope.freqs is None):
        found = "base and freqs both or neither, expected one of them"
    elif rope.freqs is not None and len(rope.freqs) != rope.dims // 2:
        found = f"{len(rope.freqs)} freqs, expected {rope.dims // 2}"
    elif not all(low <= n <= high for n in factors):
        found = f"scale, mscale, base {factors}, expected numbers from {low} to {high}"
    elif not all(low <= n <= high or n == math.inf for n in rope.freqs or ()):
        found = f"odd freqs, expected numbers from {low} to {high}, or infinite ones"
    else:
        return
    raise HeaderError(found, rule="H2", at="rope")


def _check_rope(index: int | None, header: Header, at: str) -> None:
    if index is not None and not 0 <= index < len(header.ropes):
        raise HeaderError(f"rope {index} of {len(header.ropes)}", rule="H6", at=at)
