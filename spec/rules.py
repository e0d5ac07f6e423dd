"""Join the rules of the pages with advice on them: what ``vkv explain`` prints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

SPEC = Path(__file__).parent
PAGES = SPEC / "v1"
_RULE = re.compile(r"\*\*([A-Z]\d{1,2})\*\*")


def rules() -> dict[str, dict[str, str]]:
    """Return, by rule: its page, its text, what usually breaks it, what to do."""
    advice = tomllib.loads((SPEC / "advice.toml").read_text(encoding="utf-8"))
    texts = {rule: found for page in sorted(PAGES.rglob("*.md")) for rule, found in _of(page)}
    assert texts.keys() == advice["rules"].keys(), texts.keys() ^ advice["rules"].keys()
    joined = {}
    for rule in sorted(texts, key=lambda r: (r[0], int(r[1:]))):
        page, text = texts[rule]
        cause, action = advice["rules"][rule]
        remedy = advice["actions"].get(action, action)
        joined[rule] = {"page": page, "text": text, "cause": cause, "remedy": remedy}
    return joined


def _of(page: Path) -> list[tuple[str, tuple[str, str]]]:
    """Return rule, and page and text, of every rule on a page."""
    source, name = page.read_text(encoding="utf-8"), page.relative_to(SPEC.parent).as_posix()
    return [(m[1], (name, _text(source, m))) for m in _RULE.finditer(source)]


def _text(source: str, match: re.Match[str]) -> str:
    """Return an item of a list without its number, or the paragraph that names the rule."""
    start = source.rfind("\n\n", 0, match.start()) + 2
    if source[match.start() - 2 : match.start()] == "- ":
        start = match.end()
    ends = (source.find(mark, match.end()) for mark in ("\n\n", "\n- ", "\n#"))
    end = min((e for e in ends if e >= 0), default=len(source))
    return " ".join(source[start:end].replace("**", "").split())
