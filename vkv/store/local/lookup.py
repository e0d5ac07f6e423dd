"""Find the entry with the longest prefix of a prompt, over all trees of its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from sqlite3 import Connection, Row

from vkv.store.local import prefix_tree
from vkv.store.local.file_check import tokens_of
from vkv.store.local.layout import Layout
from vkv.store.local.prefix_tree import WIDTH, DamagedEntryError, Descent, Excluded, ReadTokens
from vkv.store.local.summary import known_needs

#: Tokens that are worth depending on another file: each reference costs some 100 bytes.
MIN_SHARED = 64


@dataclass(frozen=True, slots=True)
class _Tree:
    """Describe a tree.

    Attributes:
        root: Number of its root.
        trims: Whether its caches can be trimmed.
        points: Whether its entries have checkpoints.
        codecs: Their codecs without ``raw``.
    """

    root: int
    trims: bool
    points: bool
    codecs: set[str]


def longest(
    db: Connection,
    layout: Layout,
    model: bytes,
    tokens: bytes,
    excluded: Excluded = frozenset(),
) -> tuple[Row, int] | None:
    """Return the entry that covers most leading ``tokens``, and how many it covers.

    An entry that can be trimmed covers what it shares with them; one that cannot
    covers its own tokens, if all of them lead, else those of its last checkpoint that
    leads. Of equals a lossless one is taken, then
    the one used last.

    Raises:
        DamagedEntryError: An entry to compare with cannot be read.
    """
    matches = [
        (count, not tree.codecs, row["used"], row)
        for tree in _trees(db, model)
        for row, count in _matches(db, layout, tree, tokens, excluded)
        if count
    ]
    best = max(matches, key=lambda match: match[:3], default=None)
    return None if best is None else (best[3], best[0])


def parent_for(
    db: Connection, layout: Layout, model: bytes, tokens: bytes, codecs: set[str]
) -> Row | None:
    """Return the longest entry of some codecs whose tokens all lead, to depend on.

    Args:
        db: Of the store.
        layout: Of the store.
        model: Id of the model.
        tokens: Of the prompt to be stored.
        codecs: Names of its codecs, ``raw`` left out.

    Raises:
        DamagedEntryError: As ``longest``.
    """
    read = _reader(layout)
    prefixes = [
        whole
        for tree in _trees(db, model)
        if tree.codecs == codecs
        and (whole := _whole_prefix(db, prefix_tree.search(db, tree.root, tokens, read)))
        and whole[1] >= MIN_SHARED
    ]
    best = max(prefixes, key=lambda match: (match[1], match[0]["used"]), default=None)
    return None if best is None else best[0]


def _reader(layout: Layout) -> ReadTokens:
    return lambda row: tokens_of(layout, row)


def _trees(db: Connection, model: bytes) -> Iterator[_Tree]:
    """Yield the model's trees that this build can read."""
    known = known_needs()
    query = "SELECT id, needs, trims FROM trees WHERE model = ?"
    for number, needs, trims in db.execute(query, (model,)).fetchall():
        words = needs.split()
        if known.issuperset(words):
            names = {word.partition("@")[0] for word in words if not word.startswith("+")}
            points = "+checkpoints" in words and not trims
            yield _Tree(-number, bool(trims), points, names - {"raw", "vkv"})


def _matches(
    db: Connection, layout: Layout, tree: _Tree, tokens: bytes, excluded: Excluded
) -> Iterator[tuple[Row, int]]:
    descent = prefix_tree.search(db, tree.root, tokens, _reader(layout), excluded)
    if tree.trims and descent.common:
        row = prefix_tree.below(db, descent.exit, excluded)
        if row is not None:
            yield row, descent.common
    if not tree.trims and (whole := _whole_prefix(db, descent, excluded)):
        yield whole
    if tree.points and (point := _checkpoint(db, layout, descent, tokens, excluded)):
        yield point


def _checkpoint(
    db: Connection, layout: Layout, descent: Descent, tokens: bytes, excluded: Excluded
) -> tuple[Row, int] | None:
    """Return the entry with the longest checkpoint on a path, and the tokens of that.

    Raises:
        DamagedEntryError: It does not begin with the tokens of the path.
    """
    numbers = ", ".join(map(str, excluded))
    query = f"""
        SELECT e.* FROM points p JOIN entries e ON e.n = p.entry
        WHERE p.node = ? AND e.node IS NOT NULL AND e.n NOT IN ({numbers})
        ORDER BY e.used DESC LIMIT 1
    """
    for node, depth in reversed(descent.path):
        if depth and (row := db.execute(query, (node,)).fetchone()):
            size = depth * WIDTH
            if tokens_of(layout, row)[:size] != tokens[:size]:
                raise DamagedEntryError(row, "a checkpoint is listed in a wrong place")
            return row, depth
    return None


def _whole_prefix(
    db: Connection, descent: Descent, excluded: Excluded = frozenset()
) -> tuple[Row, int] | None:
    """Return the longest entry on a path whose tokens are all a prefix, and their number."""
    numbers = ", ".join(map(str, excluded))
    query = f"""
        SELECT * FROM entries WHERE node = ? AND n NOT IN ({numbers}) ORDER BY used DESC LIMIT 1
    """
    for node, depth in reversed(descent.path):
        if row := db.execute(query, (node,)).fetchone():
            return row, depth
    return None


def but_last(tokens: bytes) -> bytes:
    """Return all but the last token, which must be computed again: it gives the logits."""
    return tokens[:-WIDTH]
