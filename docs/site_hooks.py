"""Hooks of MkDocs: pages from outside ``docs``, links between them, and anchors of rules.

Pages are written so that their links work in a checkout. README, the specification and the
policies lie outside of ``docs``; here they become pages of the site, and links follow.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

from vkv.tools.explain import rules

ROOT = Path(__file__).parents[1]
#: Patterns of files outside of ``docs`` that become part of the site.
OUTSIDE = ("README.md", "C*.md", "SECURITY.md", "spec/**/*.md", "spec/v1/*.json", "spec/bench/*")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
RULE = re.compile(r"\*\*([A-Z]\d{1,2})\*\*")


def outside() -> dict[str, Path]:
    """Return the files outside of ``docs``: path in the repository -> path on this machine."""
    paths = {path for pattern in OUTSIDE for path in ROOT.glob(pattern)}
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(paths)}


def site_path(path: str) -> str:
    """Return where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Return the file of the repository that a page of the site was made from."""
    if path == "index.md":
        return "README.md"
    return path if path in outside() else f"docs/{path}"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the files from outside of ``docs``."""
    for path, absolute in outside().items():
        file = File.generated(config, site_path(path), abs_src_path=str(absolute))
        if path.startswith("spec/decisions/"):  # reached by links alone
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    files.append(File.generated(config, "reference/rules.md", content=rules_page()))
    return files


def rules_page() -> str:
    """Return a page with all rules, each linked to where it stands: what `vkv explain` prints."""
    rows = [
        f"| [{rule.number}](../spec/{rule.page.removeprefix('spec/')}#{rule.number.lower()}) "
        f"| {rule.cause} | {rule.remedy} |"
        for rule in rules().values()
    ]
    head = "# Rules\n\nThe number at the end of a message. `vkv explain C2` prints the same.\n\n"
    return head + "\n".join(
        ["| rule | what usually breaks it | what to do |", "|---|---|---|", *rows]
    )


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Point links at pages of the site, and give every rule an anchor, as in ``#c8``."""
    here = page.file.src_uri
    if here == "reference/rules.md":  # made here, with links of the site
        return markdown

    def link(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(here)), target))
        there = site_path(path)
        if files.get_file_from_path(there) is None:
            return f"`{path}`" if text in path else f"{text} (`{path}`)"
        relative = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{mark}[{text}]({relative}{anchor or ''})"

    return with_anchors(LINK.sub(link, markdown)) if "spec/" in here else LINK.sub(link, markdown)


def with_anchors(markdown: str) -> str:
    """Give the first bold occurrence of each rule's number an id."""
    seen: set[str] = set()

    def anchor(match: re.Match[str]) -> str:
        rule = match[1]
        if rule in seen:
            return match[0]
        seen.add(rule)
        return f"**{rule}**{{ #{rule.lower()} }}"

    return RULE.sub(anchor, markdown)
