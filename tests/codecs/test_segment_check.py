"""What the header tells of segments and their codecs."""

from __future__ import annotations

import pytest

from vkv.codecs.segment_check import check_rereads
from vkv.codecs.tc.codec import Tc
from vkv.errors import CodecError
from vkv.format.header import replace
from vkv.format.schema import Header, Layer, Segment, Stored, Tensor


def head(*tensors: str, own: int = 100, basis: int = 60) -> Header:
    """A layer for each word; of it a segment for each letter, the name of its basis."""
    stored = {"codes": Stored(role="payload", dtype="U8", shape=(own,), digest=bytes(32))}
    for name in set("".join(tensors)) - {"-"}:
        stored[name] = Stored(
            role="table", dtype="U8", shape=(basis,), digest=name.encode() * 32, file=bytes(32)
        )
    layers = tuple(
        Layer(kind="kv", tensors={"keys": Tensor(dtype="F16", shape=(1,), segments=segments(word))})
        for word in tensors
    )
    return Header(version="1.0", producer="", layers=layers, tensors=stored)


def segments(word: str) -> tuple[Segment, ...]:
    """``-`` is a raw segment."""
    return tuple(
        Segment(codec="raw", version=1, tokens=1, parts={"data": "codes"})
        if name == "-"
        else Segment(codec=Tc.id, version=Tc.version, tokens=1, parts={"basis": name})
        for name in word
    )


@pytest.mark.parametrize("tensors", [["a"], ["aaaa"], ["a-a-a"], ["abc", "d"], ["aba"], ["a", "a"]])
def test_a_basis_read_again_within_the_size_of_the_file(tensors):
    check_rereads(head(*tensors))


@pytest.mark.parametrize("tensors", [["ababa"], ["a", "a", "a"], ["abc", "abc"]])
def test_bases_read_over_and_over(tensors):
    with pytest.raises(CodecError, match="read again") as caught:
        check_rereads(head(*tensors))
    assert caught.value.rule == "T23"


def test_another_name_for_the_same_bytes_is_no_other_basis():
    one = head("ababa")
    names = {name: stored for name, stored in one.tensors.items() if name != "codes"}
    same = {name: next(iter(names.values())) for name in names}
    check_rereads(head("aba"))
    with pytest.raises(CodecError):
        check_rereads(replace(head("ababab", own=10), tensors={**one.tensors, **same}))
