"""Prompt caches as mlx-lm's ``save_prompt_cache`` writes them, read without mlx-lm.

Such a file is safetensors; arrays and metadata are trees, flattened to dotted
names. For layer ``i``::

              metadata                                arrays
    to 0.31   0.i.*  numbers, as text                 i.0 keys, i.1 values, cut to what they
              1.*    the user's metadata              hold (a ChunkedKVCache's only nearly)
              2.i    class name
    0.32      0.*    the user's metadata              i.0 keys, i.1 values, whole buffers;
              1.i    class name                       i.2 and on, numbers;
              2.n.0  name of an array that stands     of a CacheList, i.j.0 the same for
              2.n.1  for a number, text or None       child j and i.j.1 its class name
              2.0    ""

No version stands in it, so what ``2.0`` holds tells the two apart. Class names
select an entry of a table here; no name from a file ever reaches ``mlx_lm``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.kinds.live import ADAPTERS
from vkv.codecs.protocol import DTYPES, NAMES
from vkv.errors import CacheError, ContainerError, VkvError
from vkv.format.kinds import Kind
from vkv.format.limits import MAX_DEPTH, MAX_TOKENS
from vkv.interop.layers import CLASSES, Saved, Tree, items, shown, snapshot
from vkv.sources.local import FileSource

#: Dots in a name: two for a layer, two more for each CacheList around it, and to spare.
MAX_DOTS = 4 + 2 * (MAX_DEPTH + 1)
MAX_NDIM, MAX_DIM = 8, (1 << 31) - 1
#: Rows of an array that has no bytes (some caches keep no values), so that no small
#: file can ask for much work.
MAX_EMPTY = MAX_TOKENS
ASCII = range(1, 128)


def read(path: str | os.PathLike[str]) -> tuple[list[Snapshot], dict[str, str]]:
    """Read a prompt cache that mlx-lm saved.

    Args:
        path: A file of mlx-lm 0.2x to 0.32. It stays open until the arrays are
            evaluated, so its name may be given to another file meanwhile.

    Returns:
        One snapshot per layer, with lazy arrays and without padding, and the
        user's metadata under its dotted names.

    Raises:
        ContainerError: Not strict safetensors (C3), or no prompt cache (C8).
        CacheError: An unknown cache class (L1), or a layer whose arrays and
            numbers are incomplete or do not fit each other (L3 to L5).
        OSError: It cannot be opened.
    """
    name = os.fspath(path)
    try:
        arrays, metadata = _open(name)
        new = _is_new(metadata)
        user = "0." if new else "1."
        own = {k: v for k, v in metadata.items() if k[:2] in ("0.", "1.", "2.") and k[:2] != user}
        layers = _new_layers(arrays, own) if new else _old_layers(arrays, own)
        snapshots = [snapshot(saved, f"layers[{i}]") for i, saved in enumerate(layers)]
    except VkvError as exc:
        raise exc.of_file(name) from None
    return snapshots, {k[2:]: v for k, v in metadata.items() if k[:2] == user}


def _open(name: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read lazy arrays and metadata, once the ``safetensors`` library has checked the framing.

    The name is opened once, since another file may take it meanwhile.
    """
    source = FileSource(name)
    try:
        path = f"/dev/fd/{source.fileno()}"
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # no dict
            forms = {key: (part.get_dtype(), part.get_shape()) for key, part in parts.items()}
        for key, form in forms.items():
            _check_form(key, *form)
        arrays: Any = mx.load(path, format="safetensors")
    except (SafetensorError, RuntimeError, ValueError) as exc:
        raise ContainerError(f"{exc}"[:200], rule="C3") from None
    finally:
        source.close()
    if forms != {key: (NAMES[x.dtype], list(x.shape)) for key, x in arrays.items()}:
        raise ContainerError("changed while it was opened", rule="C1")
    return arrays, metadata


def _check_form(name: str, dtype: str, shape: list[int]) -> None:
    """Refuse what ``mx.load`` would refuse less clearly, or read wrongly."""
    empty = 0 in shape and prod(filter(None, shape)) > MAX_EMPTY
    if dtype not in DTYPES or len(shape) > MAX_NDIM or max(shape, default=0) > MAX_DIM or empty:
        found = f"{dtype} {shape[: MAX_NDIM + 1]}"
        raise ContainerError(f"MLX has no array {found}", rule="C3", at=name[:80])


def _is_new(metadata: dict[str, str]) -> bool:
    if "2.0" not in metadata:
        raise ContainerError(
            "a safetensors file, but neither a vkv file nor a prompt cache of mlx-lm", rule="C8"
        )
    return metadata["2.0"] == ""


def _old_layers(arrays: dict[str, mx.array], metadata: dict[str, str]) -> list[Saved]:
    tree = _grow(metadata)
    names = _classes(tree.get("2"))
    states = items(_grow(arrays), "arrays", len(names))
    numbers = items(tree.get("0"), "numbers", len(names))
    found = zip(names, states, numbers, strict=True)
    return [_old(*layer, f"layers[{i}]") for i, layer in enumerate(found)]


def _old(name: Tree, state: Tree, numbers: Tree, at: str) -> Saved:
    kind = _kind(name, at)
    if kind.content == "children":
        names, inner = items(numbers, at, 2)
        children = items(names, at)
        columns = children, items(state, at, len(children)), items(inner, at, len(children))
        return _list(kind, zip(*columns, strict=True), _old, at)
    texts = [] if numbers == "" else items(numbers, at)
    known = {len(names): names for names in ADAPTERS[kind.name].saved_numbers}
    if len(texts) not in known:
        raise CacheError(f"{len(texts)} numbers, expected {min(known)}", rule="L3", at=at)
    fields = dict(zip(known[len(texts)], texts, strict=True))
    if kind.content == "slots":
        return Saved(kind, {"slots": state})
    return Saved(kind, fields | dict(zip(("keys", "values"), items(state, at, 2), strict=True)))


def _new_layers(arrays: dict[str, mx.array], metadata: dict[str, str]) -> list[Saved]:
    tree = _grow(metadata)
    names = _classes(tree.get("1"))
    marks = items(tree.get("2"), "scalars")[1:]
    states = items(_grow(_marked(arrays, marks)), "arrays", len(names))
    return [_new(*layer, f"layers[{i}]") for i, layer in enumerate(zip(names, states, strict=True))]


def _new(name: Tree, state: Tree, at: str) -> Saved:
    kind = _kind(name, at)
    if kind.content == "children":
        pairs = [items(pair, at, 2) for pair in items(state, at)]
        return _list(kind, [(child, inner) for inner, child in pairs], _new, at)
    fields = ADAPTERS[kind.name].saved_state
    return Saved(kind, dict(zip(fields, items(state, at, len(fields)), strict=True)))


def _list(
    kind: Kind, children: Iterable[tuple[Tree, ...]], parse: Callable[..., Saved], at: str
) -> Saved:
    if at.count("children") >= MAX_DEPTH:
        raise CacheError(f"nested deeper than {MAX_DEPTH}", rule="L3", at=at)
    found = enumerate(children)
    return Saved(kind, children=tuple(parse(*c, f"{at}.children[{i}]") for i, c in found))


def _classes(node: Tree) -> list[Tree]:
    """Return the class names of the layers, all known: an unknown one may have any arrays."""
    names = items(node, "classes")
    for i, name in enumerate(names):
        _kind(name, f"layers[{i}]")
    return names


def _kind(name: Tree, at: str) -> Kind:
    if not isinstance(name, str) or name not in CLASSES:
        known = ", ".join(CLASSES)
        raise CacheError(f"unknown class {shown(name)}; known are {known}", rule="L1", at=at)
    return CLASSES[name]


def _marked(arrays: dict[str, mx.array], marks: list[Tree]) -> dict[str, Tree]:
    """Return ``arrays`` with those that stand for a number, a text or nothing replaced by it."""
    out: dict[str, Tree] = dict(arrays)
    for i, mark in enumerate(marks, 1):
        name, kind = items(mark, f"scalars[{i}]", 2)
        x = out.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or not isinstance(x, mx.array):
            raise CacheError(f"no array {shown(name)}", rule="L4", at=f"scalars[{i}]")
        out[name] = _meaning(x, kind, shown(name))
    return out


def _meaning(x: mx.array, kind: Tree, at: str) -> Tree:
    whole = mx.issubdtype(x.dtype, mx.integer)
    value: Any = None
    if kind == "none":
        return None
    if kind == "scalar" and x.ndim == 0 and whole:
        value = x.item()
    elif kind == "string" and x.ndim == 1 and whole and x.size <= max(map(len, CLASSES)):
        codes: Any = x.tolist()
        value = "".join(chr(c) if c in ASCII else "?" for c in codes)
    if not isinstance(value, int | str):
        found = f"{shown(kind)} in {x.dtype} {x.shape}"
        raise CacheError(f"{found}, expected a whole number, a class or none", rule="L3", at=at)
    return value


def _grow(leaves: dict[str, Any]) -> dict[str, Tree]:
    """Build the tree that was flattened to dotted names."""
    root: dict[str, Tree] = {}
    for name, leaf in leaves.items():
        *inner, last = name.split(".", MAX_DOTS)
        node: Tree = root
        for part in inner:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node or "." in last:
            raise CacheError("stands inside another value, or too deep", rule="L4", at=shown(name))
        node[last] = leaf
    return root
