"""Hold a run of tokens in encoded form: carried over from a file, or held by a live cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx

from vkv.codecs.protocol import Codec, Parts
from vkv.format.schema import Rope


@dataclass(frozen=True, slots=True)
class EncodedRun:
    """Consecutive tokens of one tensor, encoded by one codec.

    Attributes:
        codec: Decodes ``parts``.
        parts: Arrays by name.
        tokens: How many it covers.
        roles: Role of each part in the byte account.
        rope: Undone on the keys before they were encoded.
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
        """Return ``(B, H, tokens, D)``, keys as encoded; ``shape`` gives all but the tokens."""
        return self.codec.decode(self.parts, (*shape[:-2], self.tokens, shape[-1]), dtype)

    def prefix(self, shape: tuple[int, ...], tokens: int) -> EncodedRun | None:
        """Return the first ``tokens`` tokens or fewer, as many as the codec can cut off.

        A codec with windows cuts between two of them. No error is added.

        Returns:
            ``None`` where the codec can cut off none.
        """
        if tokens >= self.tokens:
            return self
        tokens -= tokens % self.codec.window
        whole = (*shape[:-2], self.tokens, shape[-1])
        parts = self.codec.prefix(self.parts, whole, tokens) if tokens else None
        return None if parts is None else dataclasses.replace(self, parts=parts, tokens=tokens)


def follows(codec: Codec, before: EncodedRun | None) -> bool:
    """Return whether ``codec`` goes on with the tables of the run before.

    Any number of tokens can follow then. A codec with a ``refit_interval`` fits new
    tables, to the newest tokens alone, after so many.
    """
    if before is None or before.codec != codec or not codec.traits.reuses_tables:
        return False
    return codec.refit_interval == 0 or before.tokens < codec.refit_interval


def encode(codec: Codec, x: mx.array, before: EncodedRun | None) -> Parts:
    """Encode ``x``, with the tables of the run before it where the codec freezes them.

    Raises:
        VkvError: The codec refuses ``x``.
    """
    if before is not None and follows(codec, before):
        return codec.encode_after(x, before.parts)
    return codec.encode(x)


def joined(runs: Sequence[EncodedRun]) -> list[EncodedRun]:
    """Join neighbours of one codec, where the codec can join them."""
    out: list[EncodedRun] = []
    for _, group in groupby(runs, key=_key):
        same = list(group)
        parts = same[0].codec.join([run.parts for run in same]) if len(same) > 1 else None
        if parts is None:
            out += same
        else:
            tokens = sum(run.tokens for run in same)
            out.append(dataclasses.replace(same[0], parts=parts, tokens=tokens))
    return out


def _key(run: EncodedRun) -> tuple[object, ...]:
    return run.codec, run.rope, tuple(sorted(run.roles.items()))
