"""Check the values of stored parts of ``nsnquant``."""

from __future__ import annotations

import mlx.core as mx

from vkv.codecs.protocol import Parts, finite
from vkv.errors import CodecError


def check_values(parts: Parts, codebook_size: int) -> None:
    """Check scalars and codewords (N3), and indices (N4), of a segment that is not empty.

    Args:
        parts: Of the right form.
        codebook_size: Number of codewords.

    Raises:
        CodecError: A value is not finite, or an index is beyond the codebook.
    """
    floats = {name: part for name, part in parts.items() if part.dtype == mx.float16}
    if not finite(*floats.values()):
        bad = next(name for name, part in floats.items() if not finite(part))
        raise CodecError("found inf or NaN, expected finite values", rule="N3", at=bad)
    top = 0 if codebook_size == 256 else int(parts["indices"].max())
    if top >= codebook_size:
        raise CodecError(
            f"found index {top}, expected less than {codebook_size}", rule="N4", at="indices"
        )
