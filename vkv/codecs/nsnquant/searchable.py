"""Load a codebook once, with the search among its codewords."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from vkv.codecs.nsnquant import codebooks
from vkv.codecs.nsnquant.codebook_search import Search


@cache
def searchable(spec: codebooks.Spec) -> tuple[mx.array, Search]:
    """Return the F32 codewords of ``spec`` and the search among them."""
    rows = codebooks.load(spec).astype(np.float32)
    return mx.array(rows), Search(rows, magnitude=spec.magnitude, cosine=spec.cosine)
