"""Encode the tokens that leave the exact tail of a packed cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from vkv.caches.encoded import EncodedRun, encode, follows, joined
from vkv.caches.rope import rotate
from vkv.codecs.protocol import NAMES, Codec
from vkv.codecs.raw import Raw
from vkv.codecs.registry import CodecRequest
from vkv.errors import VkvError
from vkv.format.schema import Rope

#: Tokens that codecs without windows encode at a time: one by one would cost a call each.
CHUNK = 64
#: Tokens that a codec with tables fits them to, so that the fit does not depend on calls.
FIT = 256

#: Encoded runs, and the exact tokens behind them.
Encoded = tuple[tuple[EncodedRun, ...], mx.array]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encode keys or values in units that the codec sets, the newest tokens excepted.

    What is encoded depends on the tokens alone, not on how many came in one call. A codec
    that fits tables fits them to the first ``FIT`` tokens, and goes on with them.

    Attributes:
        choice: The codec asked for.
        name: ``"keys"`` or ``"values"``.
        rope: Rotary embedding of the keys, for codecs that want them without it.
        residual: Fewest newest tokens that stay exact.
        codec: ``choice`` configured for the tensor; ``None`` until the first tokens came.
        note: Why nothing more is encoded, or ``None``.
    """

    choice: CodecRequest
    name: str
    rope: Rope | None = None
    residual: int = 0
    codec: Codec | None = None
    note: str | None = None

    def configured(self, x: mx.array) -> Encoder:
        """Return the encoder with its codec configured for tensors like ``x``."""
        if self.codec is not None or self.note is not None:
            return self
        codec = self.choice.configure(self.name, NAMES[x.dtype])
        if codec.pre_rope and self.rope is None:
            codec = codec.for_rotated_keys()
        reason = codec.refuses(x.shape, x.dtype)
        return self.stopped(reason) if reason else dataclasses.replace(self, codec=codec)

    def stopped(self, reason: str) -> Encoder:
        """Return an encoder that leaves all further tokens exact, and says why."""
        note = f"asked for {self.choice.text}, held raw: {reason}"
        return dataclasses.replace(self, note=note)

    def is_due(self, tail: int) -> bool:
        """Return whether ``tail`` exact tokens may be enough for ``count`` to be above 0."""
        if self.codec is None or self.note is not None:
            return False
        window = self.codec.window
        return tail - self.residual >= (min(window, CHUNK) if window > 1 else CHUNK)

    def count(self, runs: Sequence[EncodedRun], tail: int) -> tuple[int, int]:
        """Return how many of ``tail`` exact tokens become sinks and codes now."""
        ready = tail - self.residual
        if self.codec is None or self.note is not None or ready <= 0:
            return 0, 0
        if runs and follows(self.codec, runs[-1]):
            left = self.codec.refit_interval - runs[-1].tokens
            most = left + -left % CHUNK if self.codec.refit_interval else ready
            return 0, min(ready - ready % CHUNK, most)
        lead, body = self.codec.span(ready, sum(run.tokens for run in runs))
        if self.codec.traits.reuses_tables:
            fit = max(FIT, self.codec.min_tokens)
            body = fit if body >= fit else 0
        elif self.codec.min_tokens == 1:
            body -= body % CHUNK
        return (lead, body) if body else (0, 0)

    def encode(
        self, codec: Codec, runs: Sequence[EncodedRun], tail: mx.array, count: tuple[int, int]
    ) -> Encoded:
        """Encode the first tokens of ``tail``, ``(B, H, T, D)``, behind ``runs``.

        Args:
            codec: ``self.codec``.
            runs: What is encoded already.
            tail: Exact tokens.
            count: From ``count``; not all zero.

        Raises:
            VkvError: The codec refuses the values.
        """
        lead, body = count
        start = sum(run.tokens for run in runs) + lead
        rope = self.rope if codec.pre_rope else None
        x = tail[..., lead : lead + body, :]
        if rope is not None:
            x = rotate(x, rope, start, inverse=True)
        parts = encode(codec, x, runs[-1] if runs else None)
        roles = {part: codec.roles[part] for part in parts}
        new = [*_sinks(tail, lead), EncodedRun(codec, parts, body, roles, rope)]
        merged = (*runs[:-1], *joined([*runs[-1:], *new]))
        rest = mx.contiguous(tail[..., lead + body :, :])
        # Computed soon, so that the exact tokens are freed.
        mx.async_eval(rest, [run.parts for run in merged])  # type: ignore[no-untyped-call]
        return merged, rest


def _sinks(tail: mx.array, lead: int) -> list[EncodedRun]:
    if not lead:
        return []
    x = mx.contiguous(tail[..., :lead, :])
    return [EncodedRun(Raw(dtype=NAMES[x.dtype]), {"data": x}, lead, {"data": "sink"})]


def settled(
    encoder: Encoder, runs: tuple[EncodedRun, ...], tail: mx.array
) -> tuple[Encoder, Encoded]:
    """Encode what may leave ``tail``; values that the codec refuses stay exact from then on."""
    while encoder.codec is not None:
        count = encoder.count(runs, tail.shape[-2])
        if not any(count):
            break
        try:
            runs, tail = encoder.encode(encoder.codec, runs, tail, count)
        except VkvError as exc:
            encoder = encoder.stopped(str(exc))
    return encoder, (runs, tail)
