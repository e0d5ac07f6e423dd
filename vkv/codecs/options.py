"""What the options of a codec are, as its docstring and its defaults tell it."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

from vkv.codecs.protocol import Codec
from vkv.format.schema import Scalar

_ARGS = re.compile(r"^Args:\n(.*?)(?:\n\S|\Z)", re.DOTALL | re.MULTILINE)
_ARG = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a codec string.

    Attributes:
        name: As it is written before the ``=``.
        type: ``int``, ``float``, ``bool`` or ``str``.
        keys: What it is for keys (in float16) if it is not given.
        values: The same for values.
        text: What it does, and its range.
    """

    name: str
    type: str
    keys: Scalar
    values: Scalar
    text: str


def summary(codec: type[Codec]) -> str:
    """One line on a codec."""
    return (inspect.getdoc(codec) or "").partition("\n")[0]


def options(codec: type[Codec]) -> list[Option]:
    """All options of a codec, in the order of its fields."""
    found = _ARGS.search(inspect.getdoc(codec) or "")
    texts = {m[1]: " ".join(m[2].split()) for m in _ARG.finditer(found[1] if found else "")}
    keys, values = (codec.configure({}, tensor, "F16") for tensor in ("keys", "values"))
    own: Any = codec
    return [
        Option(f.name, str(f.type), getattr(keys, f.name), getattr(values, f.name), texts[f.name])
        for f in fields(own)
    ]
