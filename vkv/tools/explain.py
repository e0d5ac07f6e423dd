"""Explain the rules of the format: what each says, what usually breaks it, what to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vkv.errors import VkvError


@dataclass(frozen=True, slots=True)
class Rule:
    """Describe one rule of ``spec/v1``.

    Attributes:
        number: Its letter and number, as errors carry it.
        page: The page of the specification that has it.
        text: What it says; code in backticks.
        cause: What usually breaks it.
        remedy: What to do.
    """

    number: str
    page: str
    text: str
    cause: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"schema_version": 1, **asdict(self)}


@cache
def rules() -> dict[str, Rule]:
    """Return every rule by its number; ``python -m spec`` writes the table from the pages."""
    table = json.loads((files("vkv.tools") / "rules.json").read_text(encoding="utf-8"))
    return {number: Rule(number, **fields) for number, fields in table.items()}


def explain(number: str) -> Rule:
    """Return the rule of a number such as ``C2``; ``[c2]``, as copied from a message, too.

    Raises:
        VkvError: There is no such rule.
    """
    wanted = number.strip("[]().,: ").upper()
    if wanted not in rules():
        letter = [n for n in rules() if n[0] == wanted[:1]]
        has = f"{wanted[:1]} has {', '.join(letter)}" if letter else "`vkv explain` lists them"
        raise VkvError(f"no rule {number[:20]!r}, expected a letter and a number; {has}")
    return rules()[wanted]
