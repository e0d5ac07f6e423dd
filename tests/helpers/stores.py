"""Make caches and files for stores, and look at what a store has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from vkv.format import container_write, framing, header
from vkv.format.document import open_document


def cache_of(tokens: Sequence[int], cls: Any = KVCache, **options: Any) -> list[Any]:
    """Two caches whose key and value of each token is the token's id."""
    made = [cls(**options) for _ in range(2)]
    rows = mx.broadcast_to(mx.array(list(tokens), mx.float32)[:, None], (1, 2, len(tokens), 32))
    for cache in made:
        cache.update_and_fetch(rows, rows)
    return made


def held(cache: Any) -> list[int]:
    """The tokens that a cache made by ``cache_of`` holds."""
    keys = cache.keys[0, 0, : cache.offset, 0]
    return [int(x) for x in keys.tolist()]


def rewritten(path: Path, target: Path, **changes) -> Path:
    """A copy of a file with another header."""
    with open_document(path) as document:
        head = header.replace(document.header, **changes)
        loads = [
            ((e.name, e.dtype, e.shape), lambda e=e: document.source.read(e.start, e.nbytes))
            for e in document.entries.values()
            if e.name != framing.HEADER
        ]
        with target.open("wb+") as out:
            container_write.write(out.fileno(), loads, lambda _: header.dump(head))
    return target


def du(store) -> int:
    """Apparent bytes of all files among the objects."""
    return sum(p.stat().st_size for p in (store.root / "objects").rglob("*") if p.is_file())


def fill(store, model, count=5, tokens=8):
    """Entries with nothing in common, the first used longest ago."""
    return [
        store.put(cache_of([n] * tokens), [n] * tokens, model=model) for n in range(1, count + 1)
    ]


def consistent(store):
    assert [str(f) for f in store.verify(deep=True).findings] == []
    assert store.stats().bytes == du(store)
    return [e.id for e in store.ls()]


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
