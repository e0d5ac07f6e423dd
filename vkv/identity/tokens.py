"""Turn token ids into bytes, and digest them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from vkv.errors import VkvError

MAX_TOKEN = (1 << 32) - 1


def token_bytes(ids: Any) -> bytes:
    """Return token ids as little-endian u32, the form that a file stores.

    Args:
        ids: Whole numbers, ``(T,)`` or ``(1, T)``: a list, a NumPy or an MLX array of
            any integer dtype.

    Raises:
        VkvError: Of another shape, not whole numbers, or outside 0 to 2^32 - 1 (I2).
    """
    if isinstance(ids, str):
        raise VkvError(
            "text, expected token ids: call tokenizer.encode first", rule="I2", at="tokens"
        )
    try:
        array = np.array(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise VkvError(f"not token ids: {exc}", rule="I2", at="tokens") from None
    if array.ndim == 2 and array.shape[0] == 1:  # a batch of one
        array = array[0]
    if array.ndim != 1:
        raise VkvError(
            f"token ids of shape {array.shape}, expected (T,) or (1, T)", rule="I2", at="tokens"
        )
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        raise VkvError(
            f"token ids of type {array.dtype}, expected whole numbers", rule="I2", at="tokens"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN:
        raise VkvError(
            f"token ids from {low} to {high}, expected 0 to {MAX_TOKEN}", rule="I2", at="tokens"
        )
    return array.astype("<u4").tobytes()


def of_tokens(ids: Any) -> bytes:
    """Return the BLAKE3 of ``token_bytes(ids)``; raises as it does."""
    return blake3(token_bytes(ids)).digest()


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of leading items that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
