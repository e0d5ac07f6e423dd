"""Sizes and ages as people write them."""

from __future__ import annotations

import pytest

from vkv.errors import VkvError
from vkv.store.local import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20 * 10**9),
        ("20 gb", 20 * 10**9),
        ("1.5MB", 1_500_000),
        ("512MiB", 512 << 20),
        ("2G", 2 * 10**9),
        ("7B", 7),
        ("7", 7),
        (7, 7),
        (0, 0),
        ("1PB", 10**15),
    ],
)
def test_size(text, size):
    assert units.size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "20XB", "-1GB", "1e9", -1, "20GBB", True, "7d"])
def test_no_size(text):
    with pytest.raises(VkvError, match="is not a size like 20GB"):
        units.size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), (1.5, 1.5)]
)
def test_age(text, seconds):
    assert units.age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "7y", "-1d", "5GB", -1])
def test_no_age(text):
    with pytest.raises(VkvError, match="is not an age like 7d"):
        units.age(text)
