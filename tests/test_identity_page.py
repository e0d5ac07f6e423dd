"""``spec/v1/identity.md`` again, with NumPy and msgpack alone: I4, I5, I6."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np
import pytest
from blake3 import blake3
from mlx.utils import tree_flatten

from fixtures.models import tiny
from vkv import identity


def sampled(x: mx.array) -> bytes:
    """The raw bytes of at most 64 values, the first and the last among them."""
    raw = np.array(mx.contiguous(x).reshape(-1).view(mx.uint8)).reshape(x.size, x.itemsize)
    count = min(64, x.size)
    return raw[[i * (x.size - 1) // max(count - 1, 1) for i in range(count)]].tobytes()


def group(parameters: dict[str, Any]) -> bytes:
    """I4: the digest of one group of parameters."""
    digest = blake3()
    for name, x in sorted(parameters.items()):
        dtype = str(x.dtype).split(".")[-1]
        digest.update(f"{name} {dtype} {list(x.shape)}\n".encode() + sampled(x))
    return digest.digest()


@pytest.mark.parametrize("layers", [1, 3])
def test_digests_are_made_as_the_page_says(layers):
    model = tiny.llama(layers=layers)
    found, _ = identity.of_model(model)
    parts = [dict(tree_flatten(layer.parameters())) for layer in model.layers]
    assert list(found.layers) == [group(part) for part in parts]
    every = dict(tree_flatten(model.parameters()))
    rest = {n: x for n, x in every.items() if ".layers." not in n}
    assert found.rest == group(rest)
    assert found.parameters == sum(x.size for x in every.values())

    config = json.loads(found.config)  # I5
    assert found.config == json.dumps(config, sort_keys=True, separators=(",", ":"))
    assert config.keys() == {"args", "unread", "weights"}
    assert config["unread"] == {"max_position_embeddings": model.args.max_position_embeddings}
    del config["unread"]
    assert "dtype" in config["weights"]

    body = {  # I6: keys in order, which Python's maps keep
        "config": json.dumps(config, sort_keys=True, separators=(",", ":")),
        "layers": list(found.layers),
        "parameters": found.parameters,
        "rest": found.rest,
        "type": found.type,
    }
    assert found.id == blake3(b"vkv model 1\n" + msgpack.packb(body)).digest()
