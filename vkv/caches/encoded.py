"""A run of tokens in encoded form: carried over from a file, or held by a live cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx

from vkv.codecs.protocol import Codec, Parts
from vkv.format.schema import Rope


@dataclass(frozen=True, slots=True)
class Kept:
    """Codes that are stored as they are.

    Attributes:
        codec: What decodes ``parts``.
        parts: By name.
        tokens: Covered.
        roles: Role of each part in the byte account.
        rope: What the keys were rotated back by before they were encoded.
    """

    codec: Codec
    parts: Parts
    tokens: int
    roles: dict[str, str]
    rope: Rope | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.parts.values())

    def decode(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """``(B, H, tokens, D)``, keys as they were encoded; ``shape`` gives all but ``tokens``."""
        return self.codec.decode(self.parts, (*shape[:-2], self.tokens, shape[-1]), dtype)

    def prefix(self, shape: tuple[int, ...], tokens: int) -> Kept | None:
        """The first ``tokens`` tokens, if the codec can cut there."""
        if tokens == self.tokens:
            return self
        whole = (*shape[:-2], self.tokens, shape[-1])
        parts = self.codec.prefix(self.parts, whole, tokens) if tokens else None
        return None if parts is None else dataclasses.replace(self, parts=parts, tokens=tokens)


def follows(codec: Codec, before: Kept | None) -> bool:
    """Return whether ``codec`` goes on with the tables of the segment before.

    Any number of tokens can follow then. A codec with a ``refit_interval`` fits new
    tables, to the newest tokens alone, after so many.
    """
    if before is None or before.codec != codec or not codec.traits.reuses_tables:
        return False
    return codec.refit_interval == 0 or before.tokens < codec.refit_interval


def encode(codec: Codec, x: mx.array, before: Kept | None) -> Parts:
    """Encode ``x``, with the tables of the codes before it where the codec freezes them.

    Raises:
        VkvError: The codec refuses ``x``.
    """
    if before is not None and follows(codec, before):
        return codec.encode_after(x, before.parts)
    return codec.encode(x)


def joined(run: Sequence[Kept]) -> list[Kept]:
    """Neighbours of one codec as one, where the codec can join them."""
    out: list[Kept] = []
    for _, group in groupby(run, key=_key):
        same = list(group)
        parts = same[0].codec.join([k.parts for k in same]) if len(same) > 1 else None
        if parts is None:
            out += same
        else:
            tokens = sum(k.tokens for k in same)
            out.append(dataclasses.replace(same[0], parts=parts, tokens=tokens))
    return out


def _key(kept: Kept) -> tuple[object, ...]:
    return kept.codec, kept.rope, tuple(sorted(kept.roles.items()))
