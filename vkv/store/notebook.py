"""Show a store in a notebook."""

from __future__ import annotations

from collections.abc import Iterable

from vkv.format.notebook import grid
from vkv.store.results import Entry

#: Entries shown.
MOST = 20


def store_table(store: Iterable[Entry]) -> str:
    """Return a table of the entries of a store that were used last."""
    entries = list(store)
    total = f"{store!r}: {len(entries):,} entries, {sum(e.size for e in entries):,} bytes"
    rows = [
        (e.id[:12], e.name, f"{e.tokens:,}", f"{e.size:,}", e.label, e.codec)
        for e in entries[:MOST]
    ]
    if len(entries) > MOST:
        rows.append((f"and {len(entries) - MOST:,} more", "", "", "", "", ""))
    return grid(total, ("id", "name", "tokens", "bytes", "model", "codec"), rows)
