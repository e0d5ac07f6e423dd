"""One cache of an mlx-lm file to a snapshot: checked, and cut to the tokens it holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import mlx.core as mx

from vkv.caches.encoded import EncodedRun
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.codecs.affine import Affine
from vkv.codecs.protocol import NAMES, check_forms
from vkv.codecs.raw import Raw
from vkv.errors import CacheError, VkvError
from vkv.format.kinds import KINDS, Kind
from vkv.format.layer_rules import check_layer
from vkv.format.limits import MAX_SLOTS
from vkv.format.schema import Layer, Segment, Tensor

#: What a file's dotted names make up.
Tree: TypeAlias = "dict[str, Tree] | mx.array | str | int | None"

#: Name of a class in any release of mlx-lm -> kind.
CLASSES = {name: kind for kind in KINDS.values() for name in kind.class_names}
MAX_DIGITS = 14


@dataclass(frozen=True, slots=True)
class Saved:
    """One cache as a file has it.

    Args:
        kind: Its kind.
        fields: Its arrays and numbers, under the names that ``vkv.format.kinds`` has for
            them; recurrent state under ``slots``. To 0.31, ``offset`` may be missing.
        children: Of a CacheList.
    """

    kind: Kind
    fields: dict[str, Tree] = field(default_factory=dict)
    children: tuple[Saved, ...] = ()


def snapshot(saved: Saved, at: str) -> Snapshot:
    """Check one cache and its children, and cut the padding of its buffers.

    Args:
        saved: The cache.
        at: Its path in messages.

    Raises:
        CacheError: Arrays and numbers are incomplete or do not fit (L3 to L5).
        CodecError: Numbers that no quantized cache has (A1, K3).
    """
    if saved.kind.content == "children":
        children = enumerate(saved.children)
        return Snapshot(
            saved.kind.name, children=[snapshot(c, f"{at}.children[{i}]") for i, c in children]
        )
    taken = _slots(saved, at) if saved.kind.content == "slots" else _rows(saved, at)
    tensors = {name: _form(value) for name, value in taken.values.items()}
    check_layer(Layer(kind=taken.kind, scalars=taken.scalars, tensors=tensors), at)
    return taken


def _form(value: Value) -> Tensor:
    """Describe ``value`` as the layer of a file that would hold it as it is."""
    codec = value.encoded[0].codec if value.encoded else Raw(dtype=NAMES[value.dtype])
    segment = Segment(codec=codec.id, version=codec.version, params=asdict(codec), parts={})  # type: ignore[call-overload]
    return Tensor(dtype=NAMES[value.dtype], shape=value.shape, segments=(segment,))


def items(node: Tree, at: str, count: int | None = None) -> list[Tree]:
    """Return the children of a node whose names are 0, 1, 2 and so on.

    Raises:
        CacheError: None, or other names, or not ``count`` of them (L4).
    """
    names = node if isinstance(node, dict) else {}
    expected = len(names) if count is None else count
    if not names or names.keys() != {str(i) for i in range(expected)}:
        text = ", ".join(sorted(names)[:8])[:80] or "nothing"
        what = "0, 1, 2 …" if count is None else f"{count} items from 0"
        raise CacheError(f"found {text}, expected {what}", rule="L4", at=at)
    return [names[str(i)] for i in range(expected)]


def shown(node: Tree) -> str:
    """Describe a node in a message, shortly."""
    if isinstance(node, str):
        return repr(node[:60])
    return "nothing" if node is None else f"a {type(node).__name__}"


def _slots(saved: Saved, at: str) -> Snapshot:
    slots = items(saved.fields["slots"], at)
    if len(slots) > MAX_SLOTS:
        raise CacheError(f"{len(slots)} slots, the limit is {MAX_SLOTS}", rule="L3", at=at)
    arrays = {str(i): x for i, x in enumerate(slots)}
    arrays |= {name: saved.fields.get(name) for name in ("left_padding", "lengths")}
    values = {}
    for name, x in arrays.items():
        if x is None:
            continue
        if not isinstance(x, mx.array):
            raise CacheError(f"{shown(x)}, expected an array", rule="L4", at=f"{at}.{name}")
        values[name] = Value(x.shape, x.dtype, x, tokens=False)
    return Snapshot(saved.kind.name, {"size": len(slots)}, values)


def _rows(saved: Saved, at: str) -> Snapshot:
    given = saved.fields
    scalars = {n: _number(given[n], f"{at}.{n}") for n in saved.kind.scalars if n in given}
    values: dict[str, Value] = {}
    for name in ("keys", "values"):
        if given[name] is not None:
            value = _codes if saved.kind.content == "codes" else _array
            values[name] = value(given[name], scalars, f"{at}.{name}")
    counts = [value.shape[-2] for value in values.values()]
    if len(set(counts)) > 1:
        raise CacheError(f"{counts} rows of keys and values, expected as many", rule="L4", at=at)
    stored = counts[0] if counts else 0
    start = scalars.get("start", 0)
    if "offset" not in scalars:
        scalars["offset"] = start + stored - _padding(values, start, stored, at)
    known = saved.kind.expected_rows(scalars) if scalars.keys() == set(saved.kind.scalars) else None
    rows = min(scalars["offset"], stored) if known is None else known
    if not 0 <= rows <= stored:
        raise CacheError(f"{stored} rows, its numbers say {rows}", rule="L5", at=at)
    cut = {name: _cut(value, rows) for name, value in values.items()} if rows else {}
    return Snapshot(saved.kind.name, scalars, cut)


def _number(node: Tree, at: str) -> int:
    if isinstance(node, str) and node.isascii() and node.isdecimal() and len(node) <= MAX_DIGITS:
        return int(node)
    if isinstance(node, int):
        return node
    raise CacheError(f"{shown(node)}, expected a whole number", rule="L3", at=at)


def _array(x: Tree, scalars: dict[str, int], at: str) -> Value:
    if not isinstance(x, mx.array) or x.ndim != 4:  # B, H, T, D
        text = str(x.shape) if isinstance(x, mx.array) else shown(x)
        raise CacheError(f"{text}, expected an array (B, H, T, D)", rule="L4", at=at)
    return Value(x.shape, x.dtype, x)


def _codes(node: Tree, scalars: dict[str, int], at: str) -> Value:
    named = zip(("codes", "scales", "biases"), items(node, at, 3), strict=True)
    parts = {name: _array(x, scalars, f"{at}.{name}") for name, x in named}
    scales = parts["scales"]
    dtype = NAMES[scales.dtype]
    try:
        codec = Affine(bits=scalars["bits"], group=scalars["group_size"], scale=dtype)
        shape = (*scales.shape[:-1], scales.shape[-1] * codec.group)
        check_forms(codec.layout(shape), {n: (NAMES[p.dtype], p.shape) for n, p in parts.items()})
    except VkvError as exc:
        raise exc.within(at) from None
    codes = {name: part.x for name, part in parts.items() if part.x is not None}
    return Value(shape, scales.dtype, encoded=(EncodedRun(codec, codes, shape[-2], codec.roles),))


def _padding(values: dict[str, Value], start: int, rows: int, at: str) -> int:
    """Count the rows at the end of a ChunkedKVCache of mlx-lm 0.31 that hold no token.

    That release cuts the buffer at the absolute offset, not at the rows in use, and
    does not save the offset: up to ``start`` rows of zeros may follow the tokens.
    (Rows of tokens that were trimmed from the end cannot be told from others.)
    """
    tail = min(start, rows)
    if tail == 0:
        return 0
    used = mx.zeros((tail,), mx.bool_)
    for value in values.values():
        if value.x is not None:
            used = used | (value.x[..., rows - tail : rows, :] != 0).any(axis=(0, 1, 3))
    last: Any = mx.argmax(used[::-1]).item() if used.any() else tail
    padding = int(last)
    if padding == rows:
        raise CacheError(f"{rows} rows, all of them zeros", rule="L5", at=at)
    return padding


def _cut(value: Value, rows: int) -> Value:
    x = None if value.x is None else value.x[..., :rows, :]
    runs = tuple(r for run in value.encoded if (r := run.prefix(value.shape, rows)))
    return replace(value, shape=(*value.shape[:-2], rows, value.shape[-1]), x=x, encoded=runs)


def check_codes(layer: Snapshot, at: str) -> None:
    """Check the codes of a quantized cache, and of those inside it.

    Raises:
        CodecError: Codes that no reader takes (A3).
    """
    for name, value in layer.values.items():
        for run in value.encoded:
            try:
                run.codec.validate(run.parts, (*value.shape[:-2], run.tokens, value.shape[-1]))
            except VkvError as exc:
                raise exc.within(f"{at}.{name}") from None
    for i, child in enumerate(layer.children):
        check_codes(child, f"{at}.children[{i}]")
