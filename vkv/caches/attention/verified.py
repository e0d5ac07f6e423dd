"""Compare the first results of a kernel with those of decoded rows.

Kernels are compiled on the machine that runs them, and cannot be run where vkv is tested. A
kernel that is wrong there would change answers without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import mlx.core as mx

#: Calls of a kernel that are compared: a kernel may leave something behind for the next one.
COMPARED = 2
#: Largest difference, of the largest value: five times that of bfloat16 sums.
TOLERANCE = 2e-2


class Verified:
    """A kernel whose first results are compared, and which is dropped if one is wrong.

    Args:
        kernel: Computes ``(B, Hq, L, Dv)``.

    Attributes:
        dropped: A result was wrong; from then on rows are decoded.
    """

    def __init__(self, kernel: Callable[..., mx.array]):
        self._kernel, self._left, self.dropped = kernel, COMPARED, False

    def __call__(self, *args: object, decoded: Callable[[], mx.array]) -> mx.array:
        """Return what the kernel computes.

        Args:
            args: Of the kernel.
            decoded: Computes the same from decoded rows.
        """
        if self.dropped:
            return decoded()
        out = self._kernel(*args)
        if not self._left:
            return out
        self._left -= 1
        want = decoded()
        if _close(out, want):
            return out
        self.dropped = True
        warnings.warn(
            "attention on codes gave another result than decoded keys and values on this GPU; "
            "they are decoded from now on. Please report it, with the output of `make test-gpu`",
            UserWarning,
            stacklevel=2,
        )
        return want


def _close(out: mx.array, want: mx.array) -> bool:
    a, b = out.astype(mx.float32), want.astype(mx.float32)
    return bool((mx.abs(a - b).max() <= TOLERANCE * mx.abs(b).max() + 1e-6).item())
