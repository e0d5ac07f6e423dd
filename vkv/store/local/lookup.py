"""Which entry has the longest prefix of a prompt, over all trees of its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from sqlite3 import Connection, Row

from vkv.store.local import entries as rows
from vkv.store.local import prefix_tree as tree
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import WIDTH, Way
from vkv.store.local.summary import known_needs

#: Tokens that are worth standing on another file: each reference costs some 100 bytes.
LEAST = 64


@dataclass(frozen=True, slots=True)
class _Tree:
    """A tree: its root, whether its caches trim, and its codecs, ``raw`` left out."""

    root: int
    trims: bool
    codecs: set[str]


def longest(db: Connection, layout: Layout, model: bytes, tokens: bytes) -> tuple[Row, int] | None:
    """The entry that covers most leading ``tokens``, and how many it covers.

    An entry that can be trimmed covers what it shares with them; one that cannot
    covers its own tokens, if all of them lead. Of equals a lossless one, then the one
    used last.

    Raises:
        DamagedError: An entry to compare with cannot be read.
    """
    found = [
        (count, not top.codecs, row["used"], row)
        for top in _trees(db, model)
        for row, count in _matches(db, layout, top, tokens)
        if count
    ]
    best = max(found, key=lambda match: match[:3], default=None)
    return None if best is None else (best[3], best[0])


def ancestor(
    db: Connection, layout: Layout, model: bytes, tokens: bytes, codecs: set[str]
) -> Row | None:
    """The longest entry of some codecs whose tokens all lead, to stand on.

    Args:
        db: Of the store.
        layout: Of the store.
        model: Id of the model.
        tokens: Of what shall be stored.
        codecs: Names of its codecs, ``raw`` left out.

    Raises:
        DamagedError: As ``longest``.
    """
    found = [
        whole
        for top in _trees(db, model)
        if top.codecs == codecs
        and (whole := whole_prefix(db, tree.search(db, top.root, tokens, _reader(layout))))
        and whole[1] >= LEAST
    ]
    best = max(found, key=lambda match: (match[1], match[0]["used"]), default=None)
    return None if best is None else best[0]


def _reader(layout: Layout) -> tree.Read:
    return lambda row: rows.tokens_of(layout, row)


def _trees(db: Connection, model: bytes) -> Iterator[_Tree]:
    """The model's trees that this build can read."""
    known = known_needs()
    query = "SELECT id, needs, trims FROM trees WHERE model = ?"
    for number, needs, trims in db.execute(query, (model,)).fetchall():
        words = needs.split()
        if known.issuperset(words):
            names = {word.partition("@")[0] for word in words if not word.startswith("+")}
            yield _Tree(-number, bool(trims), names - {"raw", "vkv"})


def _matches(
    db: Connection, layout: Layout, top: _Tree, tokens: bytes
) -> Iterator[tuple[Row, int]]:
    way = tree.search(db, top.root, tokens, _reader(layout))
    if top.trims and way.common:
        yield tree.below(db, way.exit), way.common
    if not top.trims and (whole := whole_prefix(db, way)):
        yield whole


def whole_prefix(db: Connection, way: Way) -> tuple[Row, int] | None:
    """The longest entry on a way whose tokens are all a prefix, and their number."""
    for node, depth in reversed(way.path):
        query = "SELECT * FROM entries WHERE node = ? ORDER BY used DESC LIMIT 1"
        if row := db.execute(query, (node,)).fetchone():
            return row, depth
    return None


def but_last(tokens: bytes) -> bytes:
    """All but the last token, which must be computed again: there are no logits without."""
    return tokens[:-WIDTH]
