"""Check stored layers, from the header alone (rules L3 to L6, L9). No MLX."""

from __future__ import annotations

from vkv.errors import CacheError, CodecError
from vkv.format.dtypes import FLOATS, ITEMSIZE
from vkv.format.kinds import KINDS, Kind
from vkv.format.layers import layer_at, place, stored_layers, walk
from vkv.format.limits import MAX_DEPTH
from vkv.format.schema import Header, Layer, Tensor

#: Codecs that give every bit back, and the rule by which their param `dtype` is the tensor's.
KEEPS_DTYPE = {"raw": "R2", "lossless": "X8"}


def is_basis(header: Header) -> bool:
    """Return whether a file holds tables for others, and no cache."""
    return bool(header.tables) and not header.layers


def check_cache(header: Header) -> None:
    """Refuse a file that holds no cache (rule L9).

    Raises:
        CacheError: It holds tables alone.
    """
    if is_basis(header):
        raise CacheError(
            "holds tables for other files, expected a cache; it goes to vkv.save as basis",
            rule="L9",
        )


def check_layers(header: Header) -> None:
    """Check every layer of ``header`` (rules L3 to L6).

    Raises:
        CacheError: The first layer that breaks a rule, with its path.
    """
    for path, layer in stored_layers(header):
        check_layer(layer, path)
    _check_offsets(header)
    _check_checkpoints(header)


def _check_offsets(header: Header) -> None:
    """Check that all layers that are not empty hold as many tokens as there are (L6).

    An interrupted step leaves some layers one token longer than others.
    """
    known = "" if header.tokens is None else f"there are {header.tokens.count} token ids"
    count = None if header.tokens is None else header.tokens.count
    for path, layer in walk(header.layers):
        offset = layer.scalars.get("offset", 0) if layer.kind in KINDS else 0
        if count is None and offset:
            count, known = offset, f"{path} holds {offset}"
        if offset not in (0, count):
            raise CacheError(f"holds {offset} tokens, but {known}", rule="L6", at=path)


def _check_checkpoints(header: Header) -> None:
    """Check that a checkpoint's layers are earlier states of the file's own (L12)."""
    for i, checkpoint in enumerate(header.checkpoints):
        for path, layer in checkpoint.layers.items():
            at, now = f"checkpoints[{i}].{path}", layer_at(header.layers, place(path))
            offset = layer.scalars.get("offset", checkpoint.tokens)
            if offset != checkpoint.tokens and (offset or (now and now.scalars.get("offset"))):
                text = f"holds {offset} tokens, expected the {checkpoint.tokens} of the checkpoint"
                raise CacheError(text, rule="L12", at=at)
            for name in KINDS[layer.kind].constants:
                found, expected = layer.scalars[name], now and now.scalars.get(name)
                if found != expected:
                    text = f"{name} {found}, expected the {expected} of its layer"
                    raise CacheError(text, rule="L12", at=at)
            if now is not None and _forms(layer) != _forms(now):
                text = f"tensors {_forms(layer)}, expected those of its layer, {_forms(now)}"
                raise CacheError(text, rule="L12", at=at)


def _forms(layer: Layer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and sizes of each tensor, the rows of keys and values left out."""
    rows = KINDS[layer.kind].content == "rows"
    return {
        name: (t.dtype, (*t.shape[:-2], *t.shape[-1:]) if rows else t.shape)
        for name, t in sorted(layer.tensors.items())
    }


def check_layer(layer: Layer, at: str) -> None:
    """Check one layer's scalars, tensors and children, but not the children's own."""
    if layer.kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise CacheError(f"unknown kind {layer.kind!r}; known are {known}", rule="L3", at=at)
    kind = KINDS[layer.kind]
    _check_numbers(kind, layer, at)
    if at.count("children") > MAX_DEPTH:
        raise CacheError(f"nested deeper than {MAX_DEPTH} lists", rule="L3", at=at)
    if layer.children and kind.content != "children":
        raise CacheError(f"a layer of kind {layer.kind!r} with children", rule="L3", at=at)
    for name, tensor in sorted(layer.tensors.items()):
        if name != "keys" and any(segment.rope is not None for segment in tensor.segments):
            raise CacheError("rotated, but only keys are", rule="L4", at=f"{at}.{name}")
        _check_dtypes(tensor, f"{at}.{name}")
    try:
        kind.check_scalars(layer.scalars)
    except CacheError as exc:
        raise exc.within(at) from None
    if kind.content in ("rows", "codes"):
        _check_rows(kind, layer, at)
    else:
        _check_names(layer, _slot_names(layer) if kind.content == "slots" else set(), at)


def _check_numbers(kind: Kind, layer: Layer, at: str) -> None:
    for name in kind.scalars:
        value = layer.scalars.get(name)
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise CacheError(
                f"scalar {name!r} is {value!r}, expected a whole number", rule="L3", at=at
            )


def _check_dtypes(tensor: Tensor, at: str) -> None:
    """Check that codecs keep the dtype (R2, X8) and all but ``raw`` decode to floats (K3)."""
    for i, segment in enumerate(tensor.segments):
        own = segment.params.get("dtype") if segment.codec in KEEPS_DTYPE else tensor.dtype
        if own != tensor.dtype and own in ITEMSIZE:
            found = f"{segment.codec} values of {own}, expected {tensor.dtype}"
            rule = KEEPS_DTYPE[segment.codec]
        elif not segment.is_raw and tensor.dtype not in FLOATS:
            found, rule = f"{segment.codec} in a tensor of {tensor.dtype}, expected a float", "K3"
        else:
            continue
        raise CodecError(found, rule=rule, at=f"{at}.segments[{i}]")


def _slot_names(layer: Layer) -> set[str]:
    return {*map(str, range(layer.scalars["size"])), "left_padding", "lengths"}


def _check_names(layer: Layer, allowed: set[str], at: str) -> None:
    if unknown := sorted(layer.tensors.keys() - allowed):
        raise CacheError(
            f"tensor {unknown[0]!r} in a layer of kind {layer.kind!r}", rule="L4", at=at
        )


def _check_rows(kind: Kind, layer: Layer, at: str) -> None:
    """Check keys and values: both or none, 4-D, alike but for the head dim, as long as promised."""
    _check_names(layer, {"keys", "values"}, at)
    rows = kind.expected_rows(layer.scalars)
    if not layer.tensors and rows == 0:
        return
    if layer.tensors.keys() != {"keys", "values"}:
        have = ", ".join(layer.tensors) or "no tensor"
        raise CacheError(f"has {have}, expected keys and values", rule="L4", at=at)
    for name, tensor in sorted(layer.tensors.items()):
        if tensor.dtype not in FLOATS:
            found = f"{tensor.dtype}, expected one of {', '.join(FLOATS)}"
            raise CacheError(found, rule="L4", at=f"{at}.{name}")
    keys, values = layer.tensors["keys"].shape, layer.tensors["values"].shape
    if len(keys) != 4 or keys[:3] != values[:3] or len(values) != 4:
        raise CacheError(
            f"keys {keys} and values {values}, expected (B, H, T, D) alike but for D",
            rule="L4",
            at=at,
        )
    if (
        0 in keys
    ):  # an empty cache has no tensors; rows without elements would cost nothing to claim
        raise CacheError(f"keys {keys}, expected sizes above 0", rule="L4", at=at)
    if rows is not None and keys[2] != rows:
        raise CacheError(f"{keys[2]} rows, its scalars say {rows}", rule="L5", at=at)
    if kind.content == "codes":
        _check_codes(layer, at)
    try:
        kind.check_rows(layer.scalars, keys[2])
    except CacheError as exc:
        raise exc.within(at) from None


def _check_codes(layer: Layer, at: str) -> None:
    """Check that a quantized cache has one segment of codes, in its own parameters (L4)."""
    want = {"bits": layer.scalars["bits"], "group": layer.scalars["group_size"]}
    for name, tensor in sorted(layer.tensors.items()):
        first = tensor.segments[0]
        have = {key: first.params.get(key) for key in want}
        form = len(tensor.segments), first.codec, first.rope
        if form != (1, "affine", None) or have != want or tensor.dtype != first.params.get("scale"):
            raise CacheError(
                f"{len(tensor.segments)} segments, the first of {first.codec} {have}; expected one "
                f"of affine {want}, with scales in the tensor's dtype and no rope",
                rule="L4",
                at=f"{at}.{name}",
            )
