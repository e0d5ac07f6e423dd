"""Options of codecs: declared once, beside their fields, with type, range and help.

A field of a codec is declared with ``option``. What it says is used to check values,
to convert the text of a codec string, and to list the options for a user.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from vkv.codecs.protocol import Codec, Options
from vkv.errors import CodecError
from vkv.format.schema import Scalar

_KEY = "vkv.option"
_NOUNS = {int: "an integer", float: "a float"}


@dataclass(frozen=True, slots=True)
class Range:
    """Values that an option can have, and its help.

    Attributes:
        text: What it does, as ``vkv codecs`` prints it.
        choices: All values, for an option that has few.
        low: Smallest value of a number.
        high: Largest value of a number.
        below: A bound that a number does not reach, in the place of ``high``.
    """

    text: str
    choices: tuple[Scalar, ...] = ()
    low: int | float = 0
    high: int | float = 0
    below: int | float | None = None

    def refuses(self, value: Any, kind: type) -> str | None:
        """Return what was expected instead of ``value``, types included (``4.0`` is not ``4``)."""
        if type(value) is kind and self._has(value):
            return None
        return str(self) if self.choices else f"{_NOUNS[kind]} {self}"

    def _has(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        within = value < self.below if self.below is not None else value <= self.high
        return bool(self.low <= value and within)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(_shown, self.choices))}"
        if self.below is not None:
            return f"from {_shown(self.low)} to below {_shown(self.below)}"
        return f"from {_shown(self.low)} to {_shown(self.high)}"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a codec string.

    Attributes:
        name: As it is written before the ``=``.
        type: ``int``, ``float``, ``bool`` or ``str``.
        keys: Default for keys (in float16).
        values: Default for values.
        range: Values it can have.
        text: What it does.
    """

    name: str
    type: str
    keys: Scalar
    values: Scalar
    range: str
    text: str


def option(
    default: Scalar,
    text: str,
    *,
    choices: tuple[Scalar, ...] = (),
    low: int | float = 0,
    high: int | float = 0,
    below: int | float | None = None,
) -> Any:
    """Declare a field of a codec: its default, its help, and ``choices`` or bounds."""
    return field(default=default, metadata={_KEY: Range(text, choices, low, high, below)})


def check_options(codec: Any, rule: str) -> None:
    """Check all fields of a codec that was just built.

    Raises:
        CodecError: A value is of another type or out of range (``rule``).
    """
    for name, (kind, allowed) in _declared(codec.__class__).items():
        value = getattr(codec, name)
        if expected := allowed.refuses(value, kind):
            raise CodecError(f"{value!r} is not {expected}", rule=rule, at=f"{codec.id}.{name}")


def parse_options(codec: type[Codec], texts: dict[str, str]) -> Options:
    """Convert the text values of a codec string to the types of the codec's fields.

    Raises:
        CodecError: An unknown option, or text that is not of its type (K2).
    """
    parsed: Options = {}
    declared = _declared(codec)
    for name, text in texts.items():
        if name not in declared:
            raise CodecError(
                f"unknown option {name!r}; {codec.id} takes {', '.join(declared) or 'none'}",
                rule="K2",
                at=codec.id,
            )
        parsed[name] = _convert(text, declared[name][0], f"{codec.id}.{name}")
    return parsed


def build(codec: type[Codec], params: Options) -> Codec:
    """Build a codec from a header's params, all of which must be there.

    Raises:
        CodecError: An unknown or a missing name (K2), or a value is refused.
    """
    known = _declared(codec).keys()
    if unknown := sorted(params.keys() - known):
        raise CodecError(f"unknown parameter {unknown[0]!r}", rule="K2", at=codec.id)
    if missing := sorted(known - params.keys()):
        raise CodecError(f"parameter {missing[0]!r} is missing", rule="K2", at=codec.id)
    make: Any = codec
    built: Codec = make(**params)
    return built


def summary(codec: type[Codec]) -> str:
    """Return one line on a codec: the first of its docstring."""
    return (inspect.getdoc(codec) or "").partition("\n")[0]


def options(codec: type[Codec]) -> list[Option]:
    """List all options of a codec, in the order of its fields."""
    keys, values = (codec.configure({}, tensor, "F16") for tensor in ("keys", "values"))
    return [
        Option(
            name, kind.__name__, getattr(keys, name), getattr(values, name), str(about), about.text
        )
        for name, (kind, about) in _declared(codec).items()
    ]


@cache
def _declared(codec: Hashable) -> dict[str, tuple[type, Range]]:
    """Return type and range of each field, in order."""
    cls: Any = codec
    types = get_type_hints(cls)
    return {f.name: (types[f.name], f.metadata[_KEY]) for f in fields(cls)}


def _convert(text: str, kind: type, at: str) -> Scalar:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        converted: Scalar = kind(text)
    except (ValueError, KeyError):
        raise CodecError(f"{text!r} is not of type {kind.__name__}", rule="K2", at=at) from None
    return converted


def _shown(value: object) -> str:
    """Return a value as a codec string has it, large whole numbers as powers of two."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20 and not value & (value + 1):
        return f"2^{value.bit_length()} - 1"
    return f"{value:g}" if isinstance(value, float) else str(value)
