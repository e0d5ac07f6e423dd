"""Say which caches of a CacheList may be packed."""

from __future__ import annotations

from collections.abc import Sequence


def first_packable(packs: Sequence[bool]) -> int | None:
    """Return which cache of a CacheList may be packed: its first with keys and values.

    A second one is an indexer's (deepseek_v32, minimax_m3_vl): the model sets its arrays
    itself, and an error in it selects other tokens.

    Args:
        packs: For each cache of the list, whether its kind can be packed.
    """
    return list(packs).index(True) if any(packs) else None
