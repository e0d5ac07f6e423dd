"""A kernel that is wrong is dropped with a word; its wrong result is never used."""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest

from vkv.caches.attention.verified import COMPARED, Verified

RIGHT = mx.random.normal((1, 4, 1, 64), key=mx.random.key(0))


class Counted:
    """Return one array after another, the last one for good, and count the calls."""

    def __init__(self, *results: mx.array):
        self.results, self.calls = results, 0

    def __call__(self, *args: object) -> mx.array:
        self.calls += 1
        return self.results[min(self.calls, len(self.results)) - 1]


def test_a_right_kernel_is_compared_a_few_times_and_then_trusted():
    kernel, decoded = Counted(RIGHT * 1.001), Counted(RIGHT)
    verified = Verified(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert mx.array_equal(verified(1, 2, decoded=decoded), RIGHT * 1.001)
    assert (kernel.calls, decoded.calls, verified.dropped) == (5, COMPARED, False)


@pytest.mark.parametrize(
    "wrong", [RIGHT * 1.1, mx.roll(RIGHT, 1), RIGHT * float("nan"), mx.zeros(RIGHT.shape)]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_kernel_is_dropped_and_what_it_gave_is_not_used(wrong, first):
    kernel = Counted(*([] if first else [RIGHT]), wrong)
    decoded = Counted(RIGHT)
    verified = Verified(kernel)
    with pytest.warns(UserWarning, match="attention on codes gave another result"):
        results = [verified(decoded=decoded) for _ in range(4)]
    assert all(mx.array_equal(x, RIGHT) for x in results)
    assert verified.dropped
    assert kernel.calls == (1 if first else 2)
