"""Options are declared once, beside the fields of a codec."""

from dataclasses import asdict, dataclass
from typing import ClassVar

import pytest

from vkv.codecs.options import build, check_options, option, options, parse_options
from vkv.errors import CodecError


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A codec whose module has no ``from __future__ import annotations``, as this one."""

    id: ClassVar[str] = "toy"

    bits: int = option(4, "Bits per code.", choices=(2, 4))
    share: float = option(0.25, "Share kept.", below=0.5)
    seed: int = option(1, "Of the search.", high=(1 << 63) - 1)
    exact: bool = option(True, "Whether it is exact.", choices=(True, False))
    name: str = option("a", "A name.", choices=("a", "b"))

    def __post_init__(self):
        check_options(self, "Z1")

    @classmethod
    def configure(cls, given, tensor, dtype):
        return cls(**{"name": "b" if tensor == "values" else "a", **given})


def test_text_gets_the_types_of_the_fields():
    texts = {"bits": "2", "share": "0.125", "exact": "False", "name": "b", "seed": "7"}
    parsed = parse_options(Toy, texts)
    assert parsed == {"bits": 2, "share": 0.125, "exact": False, "name": "b", "seed": 7}
    assert list(map(type, parsed.values())) == [int, float, bool, str, int]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"bits": "x"}, "toy.bits: 'x' is not of type int [K2]"),
        ({"exact": "1"}, "toy.exact: '1' is not of type bool [K2]"),
        (
            {"size": "1"},
            "toy: unknown option 'size'; toy takes bits, share, seed, exact, name [K2]",
        ),
    ],
)
def test_text_that_is_refused(texts, says):
    with pytest.raises(CodecError) as caught:
        parse_options(Toy, texts)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bits": 3}, "toy.bits: 3 is not one of 2, 4 [Z1]"),
        ({"bits": 4.0}, "toy.bits: 4.0 is not one of 2, 4 [Z1]"),
        ({"share": 0.5}, "toy.share: 0.5 is not a float from 0 to below 0.5 [Z1]"),
        ({"share": float("nan")}, "toy.share: nan is not a float from 0 to below 0.5 [Z1]"),
        ({"share": 0}, "toy.share: 0 is not a float from 0 to below 0.5 [Z1]"),
        ({"seed": -1}, "toy.seed: -1 is not an integer from 0 to 2^63 - 1 [Z1]"),
        ({"seed": True}, "toy.seed: True is not an integer from 0 to 2^63 - 1 [Z1]"),
        ({"exact": 1}, "toy.exact: 1 is not one of true, false [Z1]"),
    ],
)
def test_values_that_are_refused(given, says):
    with pytest.raises(CodecError) as caught:
        Toy(**given)
    assert str(caught.value) == says


def test_the_list_says_type_default_range_and_text():
    bits, share, *_, name = options(Toy)
    assert (bits.type, bits.keys, bits.range, bits.text) == (
        "int",
        4,
        "one of 2, 4",
        "Bits per code.",
    )
    assert share.range == "from 0 to below 0.5"
    assert (name.keys, name.values) == ("a", "b")


def test_params_must_be_all_there_and_no_others():
    params = asdict(Toy(bits=2))
    assert build(Toy, params) == Toy(bits=2)
    for wrong in ({**params, "size": 1}, {n: v for n, v in params.items() if n != "bits"}):
        with pytest.raises(CodecError) as caught:
            build(Toy, wrong)
        assert caught.value.rule == "K2"
