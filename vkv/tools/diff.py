"""Compare two files: ``vkv.diff``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vkv.format.dependencies import FileResolver, SearchPath
from vkv.format.document import Document, open_document
from vkv.format.layer_rules import check_layers
from vkv.format.layer_summary import describe
from vkv.format.layers import external_references, stored_layers
from vkv.format.notebook import facts, grid, place
from vkv.format.schema import Header, Layer
from vkv.tools.distance import Distance, distances

MISSING = "—"
#: Token ids compared at a time.
BLOCK = 1 << 12

_LAYER = re.compile(r"layers\[(\d+)\](.*)")


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two files.

    Attributes:
        at: Path to the value, e.g. ``layers[3].keys``.
        a: The value in the first file, as text.
        b: The value in the second.
    """

    at: str
    a: str
    b: str


@dataclass(slots=True, repr=False)
class Diff:
    """All differences between two files, in the order of the header.

    Attributes:
        a: The first file, as it was given.
        b: The second.
        differences: One for each place.
        model: Whether it is the same one; ``None`` if a file does not say.
        common: Leading tokens that both have; ``None`` if a file does not say.
        tokens: How many either has.
        layers: Of the file that has more.
        deep: Whether values were compared, and digests checked on the way.
        distances: Of every tensor that both have, with ``deep``.
    """

    a: str
    b: str
    differences: list[Difference] = field(default_factory=list)
    model: bool | None = None
    common: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    layers: int = 0
    deep: bool = False
    distances: list[Distance] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Diff {place(self.a)!r} {place(self.b)!r}: {self.summary}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        if self.same:
            return facts("no difference", [("A", place(self.a)), ("B", place(self.b))])
        rows = [(d.at, d.a, d.b) for d in self.rows()]
        rows += [(f"{d.at}.{d.name}", "", str(d)) for d in self.distances if str(d)]
        return grid(self.summary, ("", place(self.a), place(self.b)), rows)

    @property
    def differing(self) -> int:
        """Count the layers that differ in anything."""
        found = (_LAYER.fullmatch(d.at) for d in self.differences)
        return len({match[1] for match in found if match})

    @property
    def summary(self) -> str:
        """Return one line on model, tokens and layers.

        ``same model; the first 96 of 96 and 120 tokens are the same; 2 of 30 layers differ``
        """
        model = {True: "same model", False: "other models", None: "models not recorded"}[self.model]
        if self.common is None:
            tokens = "token ids not recorded"
        elif self.tokens == (self.common, self.common):
            tokens = f"same {self.common:,} tokens"
        else:
            a, b = self.tokens
            tokens = f"the first {self.common:,} of {a:,} and {b:,} tokens are the same"
        return f"{model}; {tokens}; {self.differing} of {self.layers} layers differ"

    @property
    def same(self) -> bool:
        return not self.differences

    def add(self, at: str, a: object, b: object) -> None:
        if a != b:
            self.differences.append(Difference(at, _text(a), _text(b)))

    def rows(self) -> list[Difference]:
        """Return one difference for each run of layers that differ alike: ``layers[0-29].keys``.

        Values are left out: ``distances`` has them.

        Digests are left out: that bytes differ is all that they tell.
        """
        runs: dict[tuple[str, str, str], list[list[int]]] = {}
        found: list[tuple[Difference, list[int]]] = []
        values = {f"{d.at}.{d.name}.values" for d in self.distances}
        forms = [d for d in self.differences if d.at not in values]
        for d in map(_without_digests, forms):
            match = _LAYER.fullmatch(d.at)
            layer, rest = (int(match[1]), match[2]) if match else (0, d.at)
            same = runs.setdefault((rest, d.a, d.b), [])
            if same and same[-1][1] == layer - 1:
                same[-1][1] = layer
            else:
                same.append([layer, layer])
                found.append((d, same[-1]))
        return [_collapsed(d, first, last) for d, (first, last) in found]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema_version": 1,
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "summary": {
                "same_model": self.model,
                "tokens": list(self.tokens),
                "tokens_in_common": self.common,
                "layers": self.layers,
                "layers_that_differ": self.differing,
            },
            "differences": [{"at": d.at, "a": d.a, "b": d.b} for d in self.differences],
            "digests_checked": self.deep,
            "distances": [d.to_dict() for d in self.distances],
        }


def _without_digests(difference: Difference) -> Difference:
    if not difference.at.endswith(".digests"):
        return difference
    return Difference(difference.at.removesuffix(".digests"), "stored bytes", "other bytes")


def _collapsed(difference: Difference, first: int, last: int) -> Difference:
    if first == last:
        return difference
    at = _LAYER.sub(rf"layers[{first}-{last}]\2", difference.at)
    return Difference(at, difference.a, difference.b)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    deep: bool = False,
    search_paths: Iterable[SearchPath] | None = None,
) -> Diff:
    """Compare two files: identity, tokens, layers, codecs, stored bytes.

    Args:
        a: One ``.vkv`` file, or a URL as ``vkv.inspect`` takes it.
        b: The other.
        deep: Also decode and compare values: largest difference and relative
            squared error of each tensor, with ``a`` as the reference.
        search_paths: Where the files they depend on are looked for, as in ``vkv.load``.

    Raises:
        VkvError: A file is damaged.
        OSError: A file cannot be opened.
    """
    with open_document(a) as first, open_document(b) as second:
        found = Diff(os.fspath(a), os.fspath(b), deep=deep)
        _identity(found, first, second)
        _layers(found, first.header, second.header)
        if found.same:  # the same in all that is told apart here, but for names and tables
            found.add("id", first.id, second.id)
        if deep:
            check_layers(first.header)
            check_layers(second.header)
            resolver = None if search_paths is None else FileResolver(search_paths)
            found.distances = list(distances(first, second, resolver))
            for distance in found.distances:
                found.add(f"{distance.at}.{distance.name}.values", "", str(distance))
        return found


def _text(value: object) -> str:
    if value is None:
        return MISSING
    return value.hex() if isinstance(value, bytes) else str(value)


def _files(head: Header) -> str | None:
    """Return the ids of dependencies, shortened; what is in them is compared by digest."""
    return ", ".join(sorted(key[:16] for key in external_references(head))) or None


def _identity(found: Diff, a: Document, b: Document) -> None:
    found.add("depends on", _files(a.header), _files(b.header))
    for name in ("version", "producer", "created"):
        found.add(name, getattr(a.header, name), getattr(b.header, name))
    for owner, fields in (
        ("model", ("type", "parameters", "config", "id")),
        ("tokenizer", ("vocab_size", "id", "template")),
    ):
        x, y = getattr(a.header, owner), getattr(b.header, owner)
        for name in fields:
            found.add(f"{owner}.{name}", getattr(x, name, None), getattr(y, name, None))
    if a.header.model and b.header.model:
        found.model = a.header.model.id == b.header.model.id
    _tokens(found, a, b)
    for key in sorted(a.header.metadata.keys() | b.header.metadata.keys()):
        found.add(f"metadata.{key}", a.header.metadata.get(key), b.header.metadata.get(key))

    for name in sorted(a.header.tables.keys() | b.header.tables.keys()):
        found.add(f"tables.{name}", _table(a.header, name), _table(b.header, name))


def _table(head: Header, name: str) -> bytes | None:
    """Digest of a table that a file offers."""
    return head.tensors[head.tables[name]].digest if name in head.tables else None


def _tokens(found: Diff, a: Document, b: Document) -> None:
    p, q = a.header.tokens, b.header.tokens
    found.tokens = (None if p is None else p.count, None if q is None else q.count)
    found.add("tokens.count", *found.tokens)
    if p is None or q is None:
        return
    shorter = found.common = min(p.count, q.count)
    if p.digest == q.digest:
        return
    x, y = (memoryview(d.read(t.tensor)).cast("I")[:shorter] for d, t in ((a, p), (b, q)))
    for start in range(0, shorter, BLOCK):
        if x[start : start + BLOCK] != y[start : start + BLOCK]:
            at = next(i for i in range(start, shorter) if x[i] != y[i])
            found.common = at
            found.add(f"tokens[{at}]", x[at], y[at])
            return


def _layers(found: Diff, a: Header, b: Header) -> None:
    found.layers = max(len(a.layers), len(b.layers))
    first, second = dict(stored_layers(a)), dict(stored_layers(b))
    for at in (*first, *(at for at in second if at not in first)):
        x, y = first.get(at), second.get(at)
        found.add(f"{at}.kind", x and x.kind, y and y.kind)
        if x is None or y is None:
            continue
        for name in sorted(x.scalars.keys() | y.scalars.keys()):
            found.add(f"{at}.{name}", x.scalars.get(name), y.scalars.get(name))
        for name in sorted(x.tensors.keys() | y.tensors.keys()):
            found.add(f"{at}.{name}", _form(x, name), _form(y, name))
            if _form(x, name) == _form(y, name):
                found.add(f"{at}.{name}.digests", _digests(a, x, name), _digests(b, y, name))


def _form(layer: Layer, name: str) -> str | None:
    tensor = layer.tensors.get(name)
    return None if tensor is None else describe(tensor)


def _digests(head: Header, layer: Layer, name: str) -> str:
    parts = [n for s in layer.tensors[name].segments for _, n in sorted(s.parts.items())]
    return " ".join(head.tensors[part].digest.hex()[:8] for part in parts)
