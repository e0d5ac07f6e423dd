"""Make the shipped codebooks: about ten minutes of one core."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from vkv.codecs.nsnquant.codebooks import SHIPPED_STEPS, Spec, train

for magnitude, cosine in product((True, False), repeat=2):
    spec = Spec(magnitude=magnitude, cosine=cosine)
    Path(__file__).with_name(spec.file).write_bytes(train(spec, SHIPPED_STEPS).tobytes())
    print(spec.file)
