"""Say how far each kind can be cut, and which of its rows any later cache shares."""

from __future__ import annotations

import pytest

from vkv.format.kinds import KINDS, leading_rows, shortest
from vkv.format.schema import Layer


def layer(kind: str, *children: Layer, **scalars: int) -> Layer:
    return Layer(kind=kind, scalars=scalars, children=children)


RING = {"keep": 2, "max_size": 8}


@pytest.mark.parametrize(
    ("given", "least"),
    [
        (layer("kv", offset=9), 0),
        (layer("concatenate", offset=9), 0),
        (layer("quantized", offset=9, bits=4, group_size=64), 0),
        (layer("rotating", offset=7, idx=7, **RING), 0),
        (layer("rotating", offset=8, idx=8, **RING), None),
        (layer("chunked", offset=9, start=0, chunk_size=4), 0),
        (layer("chunked", offset=9, start=1, chunk_size=4), 4),
        (layer("chunked", offset=9, start=4, chunk_size=4), 4),
        (layer("chunked", offset=9, start=5, chunk_size=4), 8),
        (layer("chunked", offset=11, start=9, chunk_size=4), None),
        (layer("chunked", offset=9, start=0, chunk_size=0), None),
        (layer("arrays", size=2), None),
        (layer("list", layer("kv", offset=9)), 0),
        (layer("list", layer("kv", offset=9), layer("arrays", size=1)), None),
        (layer("list", layer("chunked", offset=9, start=3, chunk_size=4)), 4),
        (layer("of a later release", offset=9), None),
        (layer("rotating", offset=3), None),
    ],
)
def test_shortest(given, least):
    assert shortest((given,)) == least
    assert shortest((layer("kv", offset=9), given)) == least


@pytest.mark.parametrize(
    ("given", "rows", "leading"),
    [
        (layer("kv", offset=9), 9, 9),
        (layer("rotating", offset=7, idx=7, **RING), 7, 7),
        (layer("rotating", offset=20, idx=20, **RING), 20, 20),
        (layer("rotating", offset=20, idx=5, **RING), 8, 2),
        (layer("chunked", offset=9, start=0, chunk_size=4), 9, 9),
        (layer("chunked", offset=9, start=5, chunk_size=4), 4, 0),
        (layer("kv", offset=0), 0, 0),
    ],
)
def test_leading_rows(given, rows, leading):
    assert leading_rows(given, rows) == leading


def test_class_names_are_of_one_kind_each():
    names = [name for kind in KINDS.values() for name in kind.class_names]
    assert len(names) == len(set(names))
    assert all(set(kind.constants) <= set(kind.scalars) for kind in KINDS.values())
