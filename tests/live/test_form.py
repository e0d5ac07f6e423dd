"""What a layer may not claim: rows that cost nothing to store."""

from __future__ import annotations

import pytest

from vkv.errors import CacheError
from vkv.header import Layer, Segment, Tensor
from vkv.live.form import check_layer


@pytest.mark.parametrize("shape", [(0, 2, 1 << 30, 8), (1, 0, 1 << 30, 8), (1, 2, 1 << 30, 0)])
@pytest.mark.parametrize("kind", ["kv", "rotating"])
def test_rows_without_elements_are_refused(kind, shape):
    ring = {"keep": 0, "max_size": shape[2], "idx": shape[2]} if kind == "rotating" else {}
    segment = Segment(codec="raw", version=1, params={"dtype": "F16"}, tokens=shape[2], parts={})
    tensor = Tensor(dtype="F16", shape=shape, segments=(segment,))
    layer = Layer(
        kind=kind,
        scalars={"offset": shape[2]} | ring,
        tensors={"keys": tensor, "values": tensor},
    )
    with pytest.raises(CacheError, match=r"expected sizes above 0 \[L4\]"):
        check_layer(layer, "layers[0]")
