"""Bounds, hashes and names, and the search among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkv.store.remote import keys

MODEL = bytes(range(32))


def data(tokens):
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def test_bounds_are_frozen():
    assert keys.bounds(31) == []
    assert keys.bounds(100) == [32, 64, 96]
    assert keys.bounds(1200) == [*range(32, 513, 32), *range(576, 1025, 64), 1152]
    assert len(keys.bounds(100_000)) == 76
    assert keys.bounds(5000) == [b for b in keys.bounds(10**6) if b <= 5000]


def test_hashes_are_frozen():
    chain = keys.chain(MODEL, data(range(70)))
    assert chain == ["ff69116b2f1af3c68860a1f22e22afbd", "e9fc18c41743b13ca5a456fd009db2b5"]
    assert keys.whole(MODEL, data(range(3))) == "12c72d314a42818610a50fa98b7106eb"


def test_a_chain_is_of_the_prefix_and_the_model():
    chain = keys.chain(MODEL, data(range(200)))
    other = keys.chain(MODEL, data([*range(100), 0, *range(101, 200)]))
    assert [x == y for x, y in zip(chain, other, strict=True)] == [True] * 3 + [False] * 3
    assert keys.chain(MODEL, data(range(170))) == chain[:5]
    assert not set(keys.chain(bytes(32), data(range(200)))) & set(chain)


@given(st.data())
def test_last_yes_finds_the_last_yes(draw):
    """Whatever the range, the answer and the number of questions at a time."""
    low = draw.draw(st.integers(0, 5))
    high = draw.draw(st.integers(low, 200))
    answer = draw.draw(st.integers(low, high))
    ways = draw.draw(st.integers(2, 9))
    asked = []

    def asks(n):
        asked.append(n)
        return n <= answer

    with ThreadPoolExecutor(1) as pool:
        assert keys.last_yes(asks, low, high, pool, ways) == answer
    assert all(low < n <= high for n in asked)
    rounds = 1
    while ways**rounds <= high - low:
        rounds += 1
    assert len(asked) <= ways * (rounds + 1)


def test_one_question_is_enough_where_nothing_is_longer():
    asked = []
    with ThreadPoolExecutor(1) as pool:
        keys.last_yes(lambda n: bool(asked.append(n)), 10, 11, pool, 8)
    assert asked == [11]


ID = "ab" * 32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"7-{ID}", (7, ID)),
        (f"{'9' * 5000}-{ID}", None),
        (f"٧-{ID}", None),
        (f"7-{ID.upper()}", None),
        (f"7-{ID}0", None),
        ("7", None),
        ("", None),
    ],
)
def test_names_that_are_none_are_passed_over(name, expected):
    assert keys.entry(name) == expected


def test_whole_prefixes_come_longest_first():
    tokens = data(range(50))
    listed = [f"{n}-{keys.whole(MODEL, tokens[: 4 * n])}-{ID}" for n in (3, 40, 20, 50)]
    listed += [f"30-{'0' * 32}-{ID}", f"60-{'0' * 32}-{ID}", "nonsense"]
    found = list(keys.whole_prefixes(listed, MODEL, tokens[:-4], longer_than=3))
    assert found == [(40, ID), (20, ID)]
