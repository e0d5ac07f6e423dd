"""The prefix tree against the obvious search over all prompts."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkv.store.local import lookup, schema
from vkv.store.local import prefix_tree as tree


class Prompts:
    """A tree and, beside it, a plain list of the prompts in it."""

    def __init__(self):
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(schema.TABLES)
        self.root = tree.root(self.db, b"model", "raw@1", True)
        self.held: dict[int, list[int]] = {}

    def read(self, row):
        return data(self.held[row["n"]])

    def add(self, tokens):
        node = tree.insert(self.db, self.root, data(tokens), self.read)
        made = self.db.execute(
            "INSERT INTO entries (id, content, tree, node, size, tokens, tokens_at, digest, label,"
            " codec, created, used) VALUES (?, '', ?, ?, 0, 0, 0, '', '', '', 0, 0)",
            (str(len(self.held) + 1), self.root, node),
        )
        self.held[made.lastrowid] = tokens

    def remove(self, n):
        row = self.db.execute("SELECT node FROM entries WHERE n = ?", (n,)).fetchone()
        self.db.execute("DELETE FROM entries WHERE n = ?", (n,))
        tree.prune(self.db, row["node"])
        del self.held[n]

    def nodes(self):
        return self.db.execute("SELECT count(*) FROM nodes").fetchone()[0]


def data(tokens):
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def check(prompts, query):
    """The search finds what looking at all prompts finds."""
    way = tree.search(prompts.db, prompts.root, data(query), prompts.read)
    best = max((common(p, query) for p in prompts.held.values()), default=0)
    assert way.common == best
    if best:
        row = tree.below(prompts.db, way.exit)
        assert common(prompts.held[row["n"]], query) == best
    ends = [len(p) for p in prompts.held.values() if query[: len(p)] == p]
    whole = lookup._whole_prefix(prompts.db, way)
    assert (whole[1] if whole else 0) == max(ends, default=0)


PROMPT = st.lists(st.sampled_from([0, 1, 256, 1 << 31]), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(PROMPT, max_size=12), st.lists(st.integers(0, 99), max_size=12), st.lists(PROMPT))
def test_finds_what_a_scan_finds(added, removed, queries):
    """Also after removals; and never takes more than two nodes a prompt."""
    prompts = Prompts()
    for tokens in added:
        prompts.add(tokens)
    for at in removed:
        if prompts.held:
            prompts.remove(sorted(prompts.held)[at % len(prompts.held)])
    for query in [*queries, *added, []]:
        check(prompts, query)
    assert prompts.nodes() <= 2 * len({tuple(p) for p in prompts.held.values()})
    for n in sorted(prompts.held):
        prompts.remove(n)
    assert prompts.nodes() == 0


@pytest.mark.parametrize("lengths", [range(1, 400), range(400, 0, -1)])
def test_a_prompt_stored_after_every_token(lengths):
    prompts = Prompts()
    for n in lengths:
        prompts.add(list(range(n)))
    check(prompts, [*range(250), 9999])
    assert prompts.nodes() == 399 + (400 in lengths)


@given(st.binary(max_size=30), st.binary(max_size=30), st.binary(max_size=30))
def test_common_bytes(head, a, b):
    assert tree.common_bytes(head + a, head + b) == len(head) + common(a, b)
