"""Hold what attention sees of the keys, or the values, of one layer."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from vkv.codecs.protocol import Codec, Parts
from vkv.format.schema import Rope


class Past(NamedTuple):
    """Exact tokens, then coded ones, then exact ones.

    Attributes:
        codec: What decodes ``parts``.
        parts: Codes of ``tokens`` tokens.
        tokens: Coded tokens.
        tail: Exact tokens behind them, ``(B, H, n, D)``; those of the current call are the last.
        head: Exact tokens before them, or ``None``.
        rope: Applied to coded keys once decoded; the first stands at position ``head_tokens``.
    """

    codec: Codec
    parts: Parts
    tokens: int
    tail: mx.array
    head: mx.array | None = None
    rope: Rope | None = None

    @property
    def head_tokens(self) -> int:
        """Exact tokens before the coded ones."""
        return 0 if self.head is None else self.head.shape[2]
