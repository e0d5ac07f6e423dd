"""Parse the configuration of the model that a header holds (H2, H13)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vkv.errors import HeaderError
from vkv.format.limits import MAX_CONFIG, MAX_CONFIG_DEPTH

_AT = "model.config"


def parse(text: str) -> Any:
    """Parse a configuration.

    Raises:
        HeaderError: Not JSON (H2), too long or nested too deep (H13).
    """
    if len(text) > MAX_CONFIG:
        found = f"{len(text)} characters, the limit is {MAX_CONFIG}"
        raise HeaderError(found, rule="H13", at=_AT)
    try:
        config = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise HeaderError(f"not JSON: {exc}"[:200], rule="H2", at=_AT) from None
    level = [config]
    for _ in range(MAX_CONFIG_DEPTH + 1):
        level = [item for value in level for item in _items(value)]
    if level:
        raise HeaderError(f"nested deeper than {MAX_CONFIG_DEPTH}", rule="H13", at=_AT)
    return config


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
