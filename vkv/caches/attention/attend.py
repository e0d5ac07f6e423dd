"""Choose how the rows of a layer are attended to, and keep the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vkv.caches.attention import cuda, portable
from vkv.caches.attention.past import Past
from vkv.caches.attention.verified import Verified
from vkv.codecs.kernels.device import on_cuda

__all__ = ["Decode", "Layer"]

#: Returns keys and values as arrays.
Decode = Callable[[], tuple[mx.array, mx.array]]


class Layer:
    """Attends to the rows of one layer, whose codecs do not change from call to call.

    What was found out for a form of rows is kept: a step should not pay for it again.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[tuple[Any, ...], bool]] = []
        # With the codebooks, whose ids are in the form.
        self._programs: list[tuple[tuple[Any, ...], Verified, Any]] = []

    def takes(self, keys: Past, values: Past, length: int) -> bool:
        """Return whether codes are attended to as they are.

        Args:
            keys, values: All tokens.
            length: New tokens, which are the last.
        """
        if length > cuda.LONGEST or keys.tokens != values.tokens:
            return False
        form = (*_form(keys), *_form(values), length)
        for known, taken in self._taken:
            if known == form:
                return taken
        refused = portable.refuses(keys, values)
        if refused is None and on_cuda():
            refused = cuda.refuses(keys, values, length)
        self._taken = [(form, refused is None), *self._taken[:7]]
        return refused is None

    def attend(
        self,
        queries: mx.array,
        keys: Past,
        values: Past,
        scale: float,
        causal: bool,
        decode: Decode,
    ) -> mx.array:
        """Attend with ``queries`` ``(B, Hq, L, D)``; ``takes`` must have said yes.

        Args:
            queries: Of the last ``L`` tokens.
            keys, values: All tokens.
            scale: Multiplies scores.
            causal: Each query sees the tokens up to its own.
            decode: Returns keys and values as arrays; the first results are compared with them.

        Returns:
            ``(B, Hq, L, Dv)`` in the dtype of ``queries``.
        """
        if not on_cuda():
            return portable.attend(queries, keys, values, scale, causal)

        def decoded() -> mx.array:
            mask = "causal" if causal else None
            return mx.fast.scaled_dot_product_attention(queries, *decode(), scale=scale, mask=mask)

        heads, length = queries.shape[1:3]
        short = cuda.is_short(keys)
        form = (*_form(keys), *_form(values), heads, length, scale, causal, short)
        for known, program, _ in self._programs:
            if known == form:
                return program(queries, keys, values, decoded=decoded)
        columns = heads // keys.tail.shape[1] * length
        program = Verified(cuda.Program(keys, values, columns, length, scale, causal))
        books = keys.parts.get("codebook"), values.parts.get("codebook")
        self._programs = [(form, program, books), *self._programs[:7]]
        return program(queries, keys, values, decoded=decoded)


def _form(past: Past) -> tuple[Any, ...]:
    """Return what a program depends on; parts are the same objects from step to step."""
    book, tail = past.parts.get("codebook"), past.tail
    return past.codec, past.rope, past.head is None, tail.shape[-1], tail.dtype, id(book)
