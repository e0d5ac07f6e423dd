"""Tell which device MLX computes on: each has its own fastest way to the same values.

Plain MLX operations are the first way, and what the others are tested against:
``kernels_cpu`` on CPUs, ``kernels_cuda`` on NVIDIA's GPUs.
"""

from __future__ import annotations

import mlx.core as mx

__all__ = ["on_cpu", "on_cuda"]


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def on_cuda() -> bool:
    return not on_cpu() and mx.cuda.is_available()
