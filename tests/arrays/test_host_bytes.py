"""Bytes of arrays: row-major, whatever the memory behind them looks like."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from blake3 import blake3

from vkv.arrays import cuda
from vkv.arrays.host_bytes import copied, digest, stored

X = mx.random.randint(0, 1 << 15, (2, 3, 64, 64), key=mx.random.key(0)).astype(mx.uint16)
VIEWS = {
    "whole": X,
    "rows of a longer buffer": X[..., :40, :],
    "few rows of it": X[..., :5, :],
    "the last heads": X[:, 1:],
    "some channels": X[..., ::2],
    "swapped axes": X.swapaxes(1, 2),
    "one number for all": mx.broadcast_to(X[:1, :1, :1, :1], (2, 2, 3, 4)),
    "no rows": X[..., :0, :],
    "a number": X[0, 0, 0, 0],
}


@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS)
def test_bytes_are_those_of_a_copy(x):
    want = np.array(x).tobytes()
    assert stored(x).nbytes == len(want)
    assert copied(x) == want
    assert digest(x) == blake3(want).digest()


@pytest.mark.parametrize("dtype", [mx.bool_, mx.int8, mx.bfloat16, mx.float32, mx.complex64])
def test_every_size_of_item(dtype):
    x = X.astype(dtype)[..., :5, :]
    whole = mx.contiguous(x)
    assert copied(x) == copied(whole)
    assert len(copied(x)) == x.nbytes


@pytest.mark.skipif(cuda.device() is not None, reason="pieces on a GPU are buffers of their own")
def test_heads_of_a_longer_buffer_are_pieces_and_nothing_is_copied():
    pieces = list(stored(X[..., :40, :]))
    assert [len(piece) for piece in pieces] == [40 * 64 * 2] * 6
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint16), np.asarray(X))
