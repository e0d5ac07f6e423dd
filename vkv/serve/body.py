"""Decode the body of a request, within bounds on its bytes and on the values in it."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np

from vkv.serve.request_error import RequestError

#: Most bytes of a body. A prompt of a million tokens has some five million bytes.
MAX_BODY = 16 << 20
#: Most JSON values in a body: each takes up to 100 bytes of memory once decoded. A
#: conversation of 1,000 messages has some 5,000.
MAX_VALUES = 200_000
#: Bytes below which a body cannot have more values than that.
_FEW = 2 * MAX_VALUES

_PLACE = re.compile(r"(?P<text>.*?)(?: - at (?:`key` in )?`\$\.?(?P<place>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)

T = TypeVar("T")


def length(text: str | None) -> int:
    """Read the header ``Content-Length``, in bytes.

    Raises:
        RequestError: If it is missing, not a number, or above ``MAX_BODY``.
    """
    if text is None:
        raise RequestError("no Content-Length, expected the length of the body", status=411)
    if not (text.isascii() and text.isdigit()):
        raise RequestError(f"Content-Length is {text[:40]!r}, expected a number")
    if len(text) > 18 or int(text) > MAX_BODY:
        raise RequestError(
            f"the body has {text[:40]} bytes, at most {MAX_BODY:,} are read", status=413
        )
    return int(text)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON as a value of the given type.

    Args:
        data: The whole body.
        kind: A msgspec Struct.

    Raises:
        RequestError: If it is not JSON, has too many values, or does not fit the type.
    """
    if len(data) > _FEW and (values := count_values(data)) > MAX_VALUES:
        raise RequestError(
            f"the body has {values:,} JSON values, at most {MAX_VALUES:,} are read", status=413
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise misfit(exc) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is not JSON: {exc}") from None


def convert(value: Any, kind: type[T], at: str) -> T:
    """Check a decoded value against a type; errors name the place ``at``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise misfit(exc, at) from None


def misfit(exc: msgspec.ValidationError, at: str = "") -> RequestError:
    """Turn an error of msgspec into one that names the parameter."""
    match = _PLACE.fullmatch(str(exc))
    text, place = (match["text"], match["place"] or "") if match else (str(exc), "")
    if of_field := _FIELD.fullmatch(text):
        param = ".".join(x for x in (at, place, of_field[2][:40]) if x)
        missing = of_field[1] == "missing required"
        tail = "is missing" if missing else "is not a parameter of this server"
        return RequestError(f"{param} {tail}", param)
    param = ".".join(x for x in (at, place.replace("[...]", "")) if x)[:80]
    text = text[:1].lower() + text[1:200]
    return RequestError(f"{param or 'the body'}: {text}", param or None)


def count_values(data: bytes) -> int:
    """Count the JSON values in ``data``, keys included, without decoding it.

    It counts the characters ``[``, ``{``, ``,`` and ``:`` outside of strings, so for
    JSON the result is never below the number of values.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    chars = np.frombuffer(plain, np.uint8)
    inside = np.logical_xor.accumulate(chars == ord('"'))
    marks = (chars == ord(",")) | (chars == ord("[")) | (chars == ord("{")) | (chars == ord(":"))
    return 1 + int(np.count_nonzero(marks & ~inside))
