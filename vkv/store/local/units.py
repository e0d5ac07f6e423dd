"""Sizes and ages as people write them: ``20GB``, ``30d``."""

from __future__ import annotations

import re

from vkv.errors import VkvError

_SIZES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_SIZES |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgtp", 1)}
_AGES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


def size(text: str | int) -> int:
    """Bytes: ``20GB`` (powers of 1000), ``512MiB`` (of 1024), or a number.

    Raises:
        VkvError: Not a size.
    """
    return int(_scaled(text, _SIZES, "a size like 20GB", "b"))


def age(text: str | float) -> float:
    """Seconds: ``90s``, ``30m``, ``12h``, ``7d``, ``2w``, or a number.

    Raises:
        VkvError: Not an age.
    """
    return _scaled(text, _AGES, "an age like 7d", "")


def _scaled(text: str | float, units: dict[str, int], what: str, suffix: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return text
    found = _TEXT.fullmatch(text.lower()) if isinstance(text, str) else None
    unit = found[2] if found else None
    if unit is not None and unit not in units:
        unit = unit.removesuffix(suffix) if suffix else None
    if found is None or unit not in units:
        raise VkvError(f"{text!r} is not {what}")
    return float(found[1]) * units[unit]
