"""The Hadamard transform, both ways."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

__all__ = ["ORDERS", "forward", "inverse", "order"]

#: Orders of the factor of ``mx.hadamard_transform`` that is not a power of two, and the
#: largest power of two beside it that every backend takes in F32.
ORDERS, MAX_POWER = (1, 12, 20, 28), 8192


def order(dim: int) -> int | None:
    """Return ``m`` of ``dim = m * 2^k`` with ``m`` in ``ORDERS`` and 2^k <= 8192, or ``None``.

    MLX does not check this itself: at other sizes it writes past its buffers.
    """
    for m in ORDERS:
        power, rest = divmod(dim, m)
        if not rest and 0 < power <= MAX_POWER and power & (power - 1) == 0:
            return m
    return None


def forward(x: mx.array) -> mx.array:
    """Compute ``H x / sqrt(D)`` along the last axis, H the Kronecker product of H_m and H_2^k."""
    return mx.hadamard_transform(x)


def inverse(x: mx.array) -> mx.array:
    """Undo ``forward``: another transform where H is not symmetric (m 20 and 28)."""
    dim = x.shape[-1]
    m = order(dim)
    if m is None or m <= 12:
        return mx.hadamard_transform(x)
    blocks = x.reshape(*x.shape[:-1], m, dim // m)
    blocks = mx.hadamard_transform(blocks) if dim > m else blocks
    return (_core(m) @ blocks).reshape(x.shape)


@cache
def _core(m: int) -> mx.array:
    """Return ``H_m^T / sqrt(m)``: row ``i`` is the transform of unit vector ``i``."""
    with mx.stream(mx.cpu):  # Metal has no kernel for these sizes alone
        core = mx.hadamard_transform(mx.eye(m))
        mx.eval(core)  # in this thread, whichever uses it later
    return core
