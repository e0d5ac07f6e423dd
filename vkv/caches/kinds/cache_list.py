"""Adapt mlx-lm's CacheList: several caches of one layer."""

from __future__ import annotations

from vkv.caches.kinds.adapter import Adapter
from vkv.format.kinds import KINDS

ADAPTER = Adapter(
    kind=KINDS["list"],
    scalars=lambda cache: {},
    values=lambda cache, scalars: {},
    make=lambda cls, scalars, loaded: cls(*loaded["children"]),
    cut=lambda cache, tokens: None,
    children=lambda cache: cache.caches,
)
