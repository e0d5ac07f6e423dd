"""Show live caches in a notebook."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vkv.format.notebook import facts, place


def prompt_table(prompt: Any) -> str:
    """Return a table on a ``Prompt``: tokens, caches, memory, where it was loaded from."""
    ids, length, info = prompt.tokens, prompt.length, prompt._info
    counts = Counter(type(c).__name__ for c in prompt.cache)
    nbytes = sum(getattr(c, "nbytes", 0) for c in prompt.cache)
    return facts(
        "Prompt",
        [
            ("token ids", "not recorded" if ids is None else f"{len(ids):,}"),
            ("tokens held", "" if length is None else f"{length:,}"),
            ("caches", ", ".join(f"{n} {name}" for name, n in counts.items())),
            ("in memory", f"{nbytes:,} bytes"),
            ("file", "" if info is None else place(info.path)),
            *(("note", note) for note in prompt.notes),
        ],
    )


def packed_facts(cache: Any) -> list[tuple[str, str]]:
    """Return what a packed cache holds: tokens, codecs, bytes, and why something is not packed."""
    keys, values = (rows.encoder.choice.text for rows in (cache.rows_keys, cache.rows_values))
    return [
        ("tokens", f"{cache.offset:,}"),
        ("keys", keys),
        ("values", values),
        ("in memory", f"{cache.nbytes:,} bytes"),
        ("note", cache.note or ""),
    ]


def packed_text(cache: Any) -> str:
    """Return one line on a packed cache."""
    facts_of = dict(packed_facts(cache))
    same = facts_of["keys"] == facts_of["values"]
    codec = facts_of["keys"] if same else f"{facts_of['keys']} / {facts_of['values']}"
    note = f", {facts_of['note']}" * bool(facts_of["note"])
    size = facts_of["in memory"]
    return f"<{type(cache).__name__}: {facts_of['tokens']} tokens, {codec}, {size}{note}>"


def packed_table(cache: Any) -> str:
    """Return a table on a packed cache."""
    return facts(type(cache).__name__, packed_facts(cache))
