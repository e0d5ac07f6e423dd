"""A live cache that holds the compressed bytes and decodes them on fetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from vkv.caches.encoded import Kept, encode, follows, joined
from vkv.caches.kinds.adapter import Packed, Snapshot, Value
from vkv.caches.rope import rotate
from vkv.codecs.protocol import NAMES, Codec, FusedContext
from vkv.codecs.raw import Raw
from vkv.codecs.registry import Choice
from vkv.errors import CacheError
from vkv.format.schema import Rope

#: Tokens that codecs without windows take at a time: one by one would cost a call each.
CHUNK = 64


#: Bytes of decoded keys and values, of all caches, that may wait for the device.
AHEAD = 1 << 29


class Rows:
    """Keys or values: codes of the old tokens, then an exact tail.

    Tokens leave the tail in the units the codec encodes (whole windows, or ``CHUNK``
    tokens), as soon as ``residual`` exact ones stay behind them. So what is held depends
    on the tokens alone, not on how many came in one call.

    Args:
        choice: The codec that encodes what leaves the tail.
        name: ``"keys"`` or ``"values"``.
        rope: Of the keys, for codecs that want them without it.
        residual: Tokens that stay exact at least, once there are as many.
        kept: Codes to go on from.
        tail: Exact tokens behind them.
        codec: The codec itself, where it is known: that of ``kept``.

    Attributes:
        note: Why nothing is encoded, if the codec refuses such tensors.
    """

    def __init__(
        self,
        choice: Choice,
        name: str,
        rope: Rope | None = None,
        residual: int = 0,
        kept: Sequence[Kept] = (),
        tail: mx.array | None = None,
        codec: Codec | None = None,
    ):
        self.choice, self.name, self.rope, self.residual = choice, name, rope, residual
        self.kept, self.tail = list(kept), tail
        self.codec = codec
        self.note: str | None = None

    def _configured(self, x: mx.array) -> Codec:
        """The codec for tensors like ``x``; one that never encodes if it refuses them."""
        codec = self.choice.configure(self.name, NAMES[x.dtype])
        if codec.pre_rope and self.rope is None:
            codec = codec.for_rotated_keys()
        reason = codec.refuses(x.shape, x.dtype)
        if reason is not None:
            self.note = f"asked for {self.choice.text}, held raw: {reason}"
        return codec

    @property
    def encoded(self) -> int:
        """Tokens in ``kept``."""
        return sum(k.tokens for k in self.kept)

    @property
    def tokens(self) -> int:
        return self.encoded + (0 if self.tail is None else self.tail.shape[-2])

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes for k in self.kept) + (0 if self.tail is None else self.tail.nbytes)

    def append(self, x: mx.array) -> None:
        """Take in ``x`` of shape ``(B, H, T, D)`` and encode what may leave the tail."""
        self.tail = x if self.tail is None else mx.concatenate([self.tail, x], axis=-2)
        if self.codec is None:
            self.codec = self._configured(x)
        ready = self.tail.shape[-2] - self.residual
        if ready > 0 and self.note is None:
            self._encode(self.codec, self.tail, *self._span(self.codec, ready))

    def _span(self, codec: Codec, ready: int) -> tuple[int, int]:
        """How many of ``ready`` tokens become sinks and codes now."""
        if follows(codec, self.kept[-1] if self.kept else None):
            return 0, ready - ready % CHUNK
        lead, body = codec.span(ready, self.encoded)
        return lead, body - body % CHUNK if codec.min_tokens == 1 else body

    def _encode(self, codec: Codec, x: mx.array, lead: int, body: int) -> None:
        """Move the first ``lead + body`` tokens of the tail ``x`` into ``kept``."""
        if body == 0:
            return
        new = []
        if lead:
            sink = mx.contiguous(x[..., :lead, :])
            new.append(Kept(Raw(dtype=NAMES[x.dtype]), {"data": sink}, lead, {"data": "sink"}))
        rope = self.rope if codec.pre_rope else None
        head = x[..., lead : lead + body, :]
        if rope is not None:
            head = rotate(head, rope, self.encoded + lead, inverse=True)
        parts = encode(codec, head, self.kept[-1] if self.kept else None)
        roles = {part: codec.roles[part] for part in parts}
        new.append(Kept(codec, parts, body, roles, rope))
        self.kept = [*self.kept[:-1], *joined([*self.kept[-1:], *new])]
        self.tail = mx.contiguous(x[..., lead + body :, :])
        # Lets the exact tokens go.
        mx.async_eval(self.tail, [k.parts for k in self.kept])  # type: ignore[no-untyped-call]

    def fetch(self) -> mx.array:
        """All tokens, ``(B, H, T, D)``, in the dtype of the tail."""
        if self.tail is None:
            raise CacheError("nothing to fetch from an empty cache", rule="L2")
        tail, pieces, start = self.tail, [], 0
        whole = self._fused(tail)
        if whole is not None:
            return whole
        for kept in self.kept:
            x = kept.decode(tail.shape, tail.dtype)
            if kept.rope is not None:
                x = rotate(x, kept.rope, start, dtype=tail.dtype)
            pieces.append(x)
            start += kept.tokens
        pieces += [tail] if tail.size or not pieces else []
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-2)

    def _fused(self, tail: mx.array) -> mx.array | None:
        """All of it by one kernel, where there is one: codes after at most some raw tokens."""
        raw = [kept.codec.traits.verbatim for kept in self.kept]
        if raw not in ([False], [True, False]):
            return None
        coded = self.kept[-1]
        head = self.kept[0].decode(tail.shape, tail.dtype) if len(raw) == 2 else None
        shape = (*tail.shape[:-2], coded.tokens, tail.shape[-1])
        context = FusedContext(head, tail, coded.rope)
        return coded.codec.decode_fused(coded.parts, shape, tail.dtype, context)

    def trim(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; a window cut through becomes exact values again."""
        if self.tail is None or tokens >= self.tokens:
            return
        if tokens < self.encoded:
            self._reopen(tokens)
        else:
            self.tail = self.tail[..., : tokens - self.encoded, :]

    def _reopen(self, tokens: int) -> None:
        everything, kept = self.fetch(), list[Kept]()
        for piece in self.kept:
            left = tokens - sum(k.tokens for k in kept)
            unit = self._unit(piece, min(left, piece.tokens))
            cut = piece.prefix(everything.shape, unit)
            if cut is None:
                break
            kept.append(cut)
            if cut.tokens < piece.tokens:
                break
        self.kept = kept
        self.tail = mx.contiguous(everything[..., self.encoded : tokens, :])

    def _unit(self, piece: Kept, tokens: int) -> int:
        """The most tokens up to ``tokens`` that the codec can cut at."""
        return tokens - tokens % piece.codec.window

    def value(self) -> Value:
        """What a snapshot holds of these rows; saved as it is."""
        tail = self.tail
        if tail is None:
            raise CacheError("an empty cache has no rows", rule="L2")
        shape = (*tail.shape[:-2], self.tokens, tail.shape[-1])
        return Value(shape, tail.dtype, tail, tuple(self.kept))


class PackedKVCache(Packed):
    """mlx-lm's cache protocol over compressed rows.

    ``nbytes`` is what is held. Keys and values are decoded for each call of
    ``update_and_fetch`` and let go after it. There is no ``bits`` attribute:
    mlx-lm would take the cache for one of its own quantized ones.

    Args:
        keys: Rows of the keys.
        values: Rows of the values.
        max_tokens: Refuse to grow beyond; ``None`` for no limit.
    """

    def __init__(self, keys: Rows, values: Rows, max_tokens: int | None = None):
        self.rows_keys, self.rows_values, self.max_tokens = keys, values, max_tokens

    @property
    def offset(self) -> int:
        return self.rows_keys.tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``(B, H, T, D)`` and return all keys and values, decoded.

        Raises:
            CacheError: More than ``max_tokens``.
        """
        after = self.offset + keys.shape[-2]
        if self.max_tokens is not None and after > self.max_tokens:
            raise CacheError(f"{after} tokens, the limit is {self.max_tokens}")
        self.rows_keys.append(keys)
        self.rows_values.append(values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return _bounded(self.rows_keys.fetch(), self.rows_values.fetch())

    @property
    def state(self) -> list[Any]:
        """All arrays held, for ``mx.eval``."""
        rows = (self.rows_keys, self.rows_values)
        tails = [r.tail for r in rows if r.tail is not None]
        return [*tails, *(k.parts for r in rows for k in r.kept)]

    @property
    def meta_state(self) -> str:
        """mlx-lm 0.31 asks for it."""
        return ""

    @property
    def nbytes(self) -> int:
        return self.rows_keys.nbytes + self.rows_values.nbytes

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        keep = self.offset - n
        self.rows_keys.trim(keep)
        self.rows_values.trim(keep)
        return n

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def dense(self) -> Any:
        """The same tokens as mlx-lm's KVCache."""
        from mlx_lm.models.cache import KVCache

        cache = KVCache()
        if not self.empty():
            cache.keys, cache.values = self.keys_and_values()
            cache.offset = self.offset
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Any:
        """One batch cache for mlx-lm's server; it is dense."""
        from mlx_lm.models.cache import BatchKVCache

        return BatchKVCache.merge([c.dense() for c in caches])

    def snapshot(self) -> Snapshot:
        """What ``vkv.save`` stores: the codes as they are, the tail exact."""
        if self.empty():
            return Snapshot("kv", {"offset": 0})
        values = {"keys": self.rows_keys.value(), "values": self.rows_values.value()}
        return Snapshot("kv", {"offset": self.offset}, values)


_waiting = 0


def _bounded(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Both, after a wait from time to time.

    Decoding of one layer does not depend on the layers before it: left alone, all layers
    would be decoded, and be as large as a dense cache, before the first is used.
    """
    global _waiting
    _waiting += keys.nbytes + values.nbytes
    if _waiting > AHEAD:
        mx.eval(keys, values)
        _waiting = 0
    return keys, values
