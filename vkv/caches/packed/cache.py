"""A live cache that holds encoded keys and values, and decodes them when they are used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from vkv.caches.attention.hook import Attention
from vkv.caches.kinds.adapter import Packed, Snapshot
from vkv.caches.notebook import packed_table, packed_text
from vkv.caches.packed import batch
from vkv.caches.packed.rows import Rows
from vkv.errors import CacheError
from vkv.format.layers import LATENTS, is_latent

_SAVE = "a packed cache of vkv; save it with vkv.save, which stores its codes as they are"


class PackedKVCache(Packed):
    """mlx-lm's cache protocol over encoded rows.

    The tokens of the present call are attended to exactly, all earlier ones as the codec
    decodes them. What may be encoded is encoded at the next call, or before anything else
    looks at the cache, so what it holds does not depend on how a prompt was split.

    ``nbytes`` is the compressed size. Where the model leaves attention to mlx-lm, a few new
    tokens attend to the codes as they are. Otherwise keys and values are decoded for the
    call of ``update_and_fetch`` and freed after it. There is no ``bits`` attribute: mlx-lm
    would take the cache for one of its own quantized ones.

    Attributes:
        rows_keys: Keys; the tail may hold more tokens than it will keep (``settle``).
        rows_values: Values.
        max_tokens: Refuse to grow beyond; ``None`` for no limit.
        attention: How it meets attention; ``None``: rows are always decoded.
    """

    def __init__(
        self,
        keys: Rows,
        values: Rows,
        max_tokens: int | None = None,
        attention: Attention | None = None,
    ):
        self.rows_keys, self.rows_values, self.max_tokens = keys, values, max_tokens
        self.attention = attention

    __repr__ = packed_text
    _repr_html_ = packed_table

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self.rows_keys.tokens

    @property
    def note(self) -> str | None:
        """Return why keys or values are not encoded, or ``None``."""
        return self.rows_keys.encoder.note or self.rows_values.encoder.note

    @property
    def attention_note(self) -> str | None:
        """Return why the model was given decoded keys and values for attention, or ``None``."""
        return None if self.attention is None else self.attention.route.note

    @property
    def encodes(self) -> bool:
        """Return whether keys or values are encoded, once there are any."""
        return None in (self.rows_keys.encoder.note, self.rows_values.encoder.note)

    def settle(self) -> None:
        """Encode the tokens of the last call, as far as they may leave the tail."""
        self.rows_keys, self.rows_values = self.rows_keys.settle(), self.rows_values.settle()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``(B, H, T, D)`` and return all keys and values; the new ones are exact.

        Returns:
            Arrays; or, to code that was seen to pass them on to mlx-lm's attention as they
            are, what stands for them there.

        Raises:
            CacheError: More than ``max_tokens``.
        """
        after = self.offset + keys.shape[-2]
        if self.max_tokens is not None and after > self.max_tokens:
            raise CacheError(f"{after} tokens, the limit is {self.max_tokens}")
        if self.rows_keys.tail is None and is_latent(keys.shape, values.shape):
            self.rows_keys, self.rows_values = (
                rows.stop(LATENTS) for rows in (self.rows_keys, self.rows_values)
            )
        self.settle()
        self.rows_keys = self.rows_keys.append(keys)
        self.rows_values = self.rows_values.append(values)
        decode = partial(self._decoded, keys)
        one, two = self.rows_keys.past(), self.rows_values.past()
        if self.attention is None or one is None or two is None:
            return decode()
        return self.attention.offer(sys._getframe(1).f_code, keys.shape[-2], one, two, decode)

    def _decoded(self, after: mx.array) -> tuple[mx.array, mx.array]:
        return self.rows_keys.decode(after=after), self.rows_values.decode(after=after)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values; those of the last call are exact until ``settle``.

        Models whose layers share keys read them here, in the call that appended them.
        """
        return self.rows_keys.decode(), self.rows_values.decode()

    @property
    def keys(self) -> mx.array | None:
        """All keys, decoded, ``(B, H, T, D)``; ``None`` for an empty cache."""
        return None if self.rows_keys.tail is None else self.rows_keys.decode()

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """Compute ``keys`` whenever the cache is computed.

        Models of mlx-lm write ``cache.keys = mx.depends(cache.keys, message)`` to have a
        message sent, or an index written, together with the cache.

        Raises:
            CacheError: Not the shape of ``cache.keys``: codes cannot be replaced.
        """
        tail, held = self.rows_keys.tail, self.offset
        if tail is None or keys.shape != (*tail.shape[:-2], held, tail.shape[-1]):
            raise CacheError(f"keys {keys.shape} in place of {held} encoded tokens", rule="L2")
        rows = self.rows_keys
        self.rows_keys = Rows(rows.encoder, rows.runs, mx.depends(tail, keys))

    @property
    def values(self) -> mx.array | None:
        """All values, decoded, ``(B, H, T, D)``; ``None`` for an empty cache."""
        return None if self.rows_values.tail is None else self.rows_values.decode()

    @property
    def state(self) -> list[Any]:
        """All arrays held, for ``mx.eval``; mlx-lm's ``save_prompt_cache`` refuses it."""
        self.settle()
        return [*self.rows_keys.arrays, *self.rows_values.arrays, _NotForMlxLm()]

    @property
    def meta_state(self) -> str:
        """Refuse ``save_prompt_cache`` of mlx-lm 0.31, which alone asks for it.

        Raises:
            CacheError: Always.
        """
        raise CacheError(_SAVE)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        self.settle()
        return self.rows_keys.nbytes + self.rows_values.nbytes

    def size(self) -> int:
        """Return the number of tokens, as mlx-lm's caches do."""
        return self.offset

    def empty(self) -> bool:
        """Return whether no token is held."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Return ``True``: every token can be dropped."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last ``n`` tokens, and return how many were dropped.

        Tokens of the last call are dropped exactly, as if they had never come.
        """
        n = min(self.offset, n)
        keep = self.offset - n
        self.rows_keys, self.rows_values = self.rows_keys.trim(keep), self.rows_values.trim(keep)
        return n

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the causal mask that mlx-lm makes for a KVCache of this length."""
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(*args, offset=self.offset, **kwargs)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Return one dense batch cache; ``caches`` may be packed or mlx-lm's own."""
        return batch.merge(caches)

    def snapshot(self) -> Snapshot:
        """Return what ``vkv.save`` stores: the codes as they are, the tail exact.

        Raises:
            CacheError: An array cannot be computed in this thread (L2).
        """
        try:
            mx.eval(self.state)
        except RuntimeError as exc:
            raise CacheError(
                f"holds an array that cannot be computed here ({exc}); call mx.eval on the "
                "cache in the thread that filled it",
                rule="L2",
            ) from None
        if self.empty():
            return Snapshot("kv", {"offset": 0})
        values = {"keys": self.rows_keys.value(), "values": self.rows_values.value()}
        return Snapshot("kv", {"offset": self.offset}, values)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, of a settled cache."""
        self.settle()
        return self.__dict__.copy()


class _NotForMlxLm:
    """An item of ``state`` that ``mx.eval`` skips, and that no file can hold."""

    def __repr__(self) -> str:
        return _SAVE
