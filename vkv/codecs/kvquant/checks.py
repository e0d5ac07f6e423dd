"""Check values of ``kvquant``: those to be encoded, and those of stored parts."""

from __future__ import annotations

from math import prod

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vkv.codecs.kvquant import outliers
from vkv.codecs.protocol import Parts, finite
from vkv.errors import CodecError
from vkv.format.dtypes import F16_MAX


def check_values(parts: Parts, shape: tuple[int, ...]) -> None:
    """Check levels (Q4), bounds (Q5) and the list of outliers (Q6, Q7) of a segment.

    Args:
        parts: Of the right form.
        shape: Covered, ``(B, H, T, D)``.

    Raises:
        CodecError: A value breaks its rule.
    """
    if not _ascends(parts["levels"]):
        raise CodecError("expected finite and ascending values", rule="Q4", at="levels")
    if "bounds" in parts and not _ascends(parts["bounds"]):
        raise CodecError("expected finite pairs, low then high", rule="Q5", at="bounds")
    if "gaps" in parts:
        outliers.validate(parts["gaps"], parts["outliers"], prod(shape))


def floats(x: mx.array, at: str, low: float = -F16_MAX) -> npt.NDArray[np.float32]:
    """Return ``x`` as NumPy's float32.

    Raises:
        CodecError: A value is below ``low``, above the largest F16, or NaN (Q8).
    """
    data = np.asarray(x.astype(mx.float32))
    if not (data.min() >= low and data.max() <= F16_MAX):  # NaN is neither
        raise CodecError(
            f"{data.min()} to {data.max()}, expected {low:g} to {F16_MAX:g}",
            rule="Q8",
            at=f"kvquant.{at}",
        )
    return data


def _ascends(x: mx.array) -> bool:
    """Return whether every row of F16 ``x`` is finite and ascends."""
    return finite(x) and bool((x[..., 1:] >= x[..., :-1]).all())
