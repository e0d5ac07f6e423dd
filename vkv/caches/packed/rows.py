"""Keys or values of a packed cache: encoded runs, then an exact tail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from vkv.caches.attention.past import Past
from vkv.caches.encoded import EncodedRun
from vkv.caches.kinds.adapter import Value
from vkv.caches.packed.encoder import Encoder, settled
from vkv.caches.rope import rotate
from vkv.codecs.protocol import FusedContext
from vkv.errors import CacheError


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor ``(B, H, T, D)`` of a packed cache, in token order; never changed in place.

    Attributes:
        encoder: Encodes what leaves the tail.
        runs: Encoded tokens, the oldest.
        tail: Exact tokens behind them; ``None`` for a cache that was never filled.
    """

    encoder: Encoder
    runs: tuple[EncodedRun, ...] = ()
    tail: mx.array | None = None

    @property
    def encoded(self) -> int:
        """Tokens in ``runs``."""
        return sum(run.tokens for run in self.runs)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.encoded + (0 if self.tail is None else self.tail.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded runs and the tail."""
        return sum(run.nbytes for run in self.runs) + (0 if self.tail is None else self.tail.nbytes)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays held, in a fixed order."""
        parts = [run.parts[name] for run in self.runs for name in sorted(run.parts)]
        return parts if self.tail is None else [*parts, self.tail]

    def append(self, x: mx.array) -> Rows:
        """Return the rows with ``x``, ``(B, H, T, D)``, at the end of the tail."""
        tail = x if self.tail is None else mx.concatenate([self.tail, x], axis=-2)
        return Rows(self.encoder.configured(x), self.runs, tail)

    def stop(self, reason: str) -> Rows:
        """Return rows that leave all further tokens exact, and say why."""
        return dataclasses.replace(self, encoder=self.encoder.stopped(reason))

    def settle(self) -> Rows:
        """Return the rows with all tokens encoded that may leave the tail."""
        if self.tail is None or not self.encoder.is_due(self.tail.shape[-2]):
            return self
        encoder, (runs, tail) = settled(self.encoder, self.runs, self.tail)
        return Rows(encoder, runs, tail)

    def decode(self, after: mx.array | None = None) -> mx.array:
        """Decode all tokens to ``(B, H, T, D)``, in the dtype of the tail.

        Args:
            after: Decode no sooner than this array is computed. Without it, the rows of
                every layer could be decoded before the first layer is done with its own,
                and take as much memory as a dense cache.

        Raises:
            CacheError: Nothing was ever appended (L2).
        """
        tail = self._filled()
        runs = self.runs if after is None else tuple(_delayed(run, after) for run in self.runs)
        if (fused := _fused(runs, tail)) is not None:
            return fused
        pieces = [*_decoded(runs, tail), tail]
        pieces = [x for x in pieces if x.shape[-2]] or [tail]
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-2)

    def past(self) -> Past | None:
        """Return what attention on codes needs, or ``None`` for rows of another form.

        They are one run of codes, after at most one of exact tokens.
        """
        if self.tail is None or not 0 < len(self.runs) < 3:
            return None
        codes = self.runs[-1]
        exact = self.runs[0] if len(self.runs) == 2 else None
        if codes.codec.traits.verbatim or not (exact is None or exact.codec.traits.verbatim):
            return None
        head = None if exact is None else exact.parts["data"]
        return Past(codes.codec, codes.parts, codes.tokens, self.tail, head, codes.rope)

    def trim(self, tokens: int) -> Rows:
        """Return the first ``tokens`` tokens; those of a window that is cut become exact."""
        if self.tail is None or tokens >= self.tokens:
            return self
        if tokens >= self.encoded:
            tail = self.tail[..., : tokens - self.encoded, :]
            return dataclasses.replace(self, tail=tail)
        runs, start = list[EncodedRun](), 0
        while start + self.runs[len(runs)].tokens <= tokens:
            runs.append(self.runs[len(runs)])
            start += runs[-1].tokens
        return self._cut(runs, start, tokens)

    def _cut(self, runs: list[EncodedRun], start: int, tokens: int) -> Rows:
        """Cut the run behind ``runs``, whose first token is token ``start``."""
        tail, run = self._filled(), self.runs[len(runs)]
        left = tokens - start
        cut = run.prefix(tail.shape, left)
        decoded = _decode_run(run, start, tail)[..., 0 if cut is None else cut.tokens : left, :]
        kept = runs if cut is None else [*runs, cut]
        return Rows(self.encoder, tuple(kept), mx.contiguous(decoded))

    def value(self) -> Value:
        """Return what a snapshot holds of these rows; it is saved as it is."""
        tail = self._filled()
        shape = (*tail.shape[:-2], self.tokens, tail.shape[-1])
        return Value(shape, tail.dtype, tail, self.runs)

    def _filled(self) -> mx.array:
        if self.tail is None:
            raise CacheError("an empty cache has no rows", rule="L2")
        return self.tail


def _delayed(run: EncodedRun, after: mx.array) -> EncodedRun:
    names = list(run.parts)
    parts = mx.depends([run.parts[name] for name in names], [after])
    return dataclasses.replace(run, parts=dict(zip(names, parts, strict=True)))


def _decoded(runs: tuple[EncodedRun, ...], like: mx.array) -> Iterator[mx.array]:
    start = 0
    for run in runs:
        yield _decode_run(run, start, like)
        start += run.tokens


def _decode_run(run: EncodedRun, start: int, like: mx.array) -> mx.array:
    """Decode a run whose first token is token ``start``; keys get their rope back."""
    x = run.decode(like.shape, like.dtype)
    return x if run.rope is None else rotate(x, run.rope, start, dtype=like.dtype)


def _fused(runs: tuple[EncodedRun, ...], tail: mx.array) -> mx.array | None:
    """Decode codes, sinks before them and the tail behind them by one kernel, or ``None``."""
    verbatim = [run.codec.traits.verbatim for run in runs]
    if verbatim not in ([False], [True, False]):
        return None
    head = runs[0].decode(tail.shape, tail.dtype) if len(runs) == 2 else None
    codes = runs[-1]
    shape = (*tail.shape[:-2], codes.tokens, tail.shape[-1])
    context = FusedContext(head, tail, codes.rope)
    return codes.codec.decode_fused(codes.parts, shape, tail.dtype, context)
