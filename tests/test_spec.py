"""The pages of ``spec/v1``, the code and the fixtures say the same."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from spec.__main__ import files
from vkv.caches.kinds.live import ADAPTERS
from vkv.codecs.protocol import DTYPES
from vkv.format import framing, header, limits
from vkv.format.dtypes import ITEMSIZE
from vkv.format.file_id import FileId
from vkv.format.kinds import KINDS
from vkv.format.schema import ROLES, Header

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "spec" / "v1"
FIXTURES = ROOT / "fixtures" / "v1"
PAGE = (SPEC / "format.md").read_text()
RULE = re.compile(r"[A-Z]\d{1,2}")

#: Of these letters every rule has a bad file. Of L, rules 3 to 6 are about files; the others, and
#: those of identity (I), are about live objects. Those of other codecs are tested beside them.
OF_FILES = "CHKDRATX"
#: Rules that no file can break, or none that is small; where they are tested instead.
WITHOUT_BAD_FILE = {
    "C9": "binds readers; good/C9-other-order.vkv",
    "H5": "takes a megabyte; test_header",
    "K1": "no fault of the file; future/codec.vkv",
    "K4": "the layout fixes the shape; test_hostile",
    "D2": "no ground to refuse a file; test_hostile",
    "T4": "binds encoders; codecs/test_tc",
    "T6": "H10 refuses it first; codecs/test_tc",
    "T9": "says what comes out; reference_tc",
    "T14": "says what comes out; what does not fit breaks T13",
    "X7": "says what comes out; reference/lossless",
    "X10": "says what comes out; reference/lossless",
    "T23": "takes more of a basis than a small file has; codecs/test_fit",
}


def rules_of(page: str) -> set[str]:
    return set(re.findall(rf"\*\*({RULE.pattern})\*\*", page))


PAGES = {p: rules_of(p.read_text()) for p in sorted(SPEC.rglob("*.md"))}
RULES = set().union(*PAGES.values())


def literals(folder: str) -> set[str]:
    """String literals of the Python files under ``folder`` that look like a rule's number."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(rf"\b{RULE.pattern}\b", node.value))
    return found - ITEMSIZE.keys()


def raised(folder: str) -> set[str]:
    """Literals that are nothing but a rule's number: those that errors carry."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if RULE.fullmatch(node.value) else set()
    return found - ITEMSIZE.keys()


@pytest.mark.parametrize("path", files(), ids=lambda p: p.name)
def test_derived_files_are_up_to_date(path):
    assert path.read_text() == files()[path], "run `python -m spec`"


def test_a_number_stands_on_one_page_only():
    assert sum(len(rules) for rules in PAGES.values()) == len(RULES)


def test_every_rule_that_is_raised_is_on_a_page():
    assert raised("vkv") - RULES == set()


def test_every_rule_on_a_page_is_raised_or_tested():
    tested = literals("tests") | {p.name.split("-")[0] for p in FIXTURES.rglob("*.vkv")}
    assert RULES - raised("vkv") - tested == set()


def test_every_rule_has_a_bad_file():
    have = {p.name.split("-")[0] for p in (FIXTURES / "bad").iterdir()}
    want = {r for r in RULES if r[0] in OF_FILES or r in ("L3", "L4", "L5", "L6")}
    assert want - have == WITHOUT_BAD_FILE.keys()
    assert have <= RULES - WITHOUT_BAD_FILE.keys()


def table(page: str, title: str) -> list[list[str]]:
    """Cells of the table whose header row starts with ``title``."""
    _, _, rest = page.partition(f"| {title} |")
    lines = rest.splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]


def names(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def test_kinds():
    rows = table(PAGE, "kind")
    assert {names(r[0])[0]: names(r[1]) for r in rows} == {
        kind.name: kind.scalars for kind in KINDS.values()
    }
    assert {names(r[0])[0]: r[3] for r in rows} == {
        kind.name: kind.class_names[0] for kind in KINDS.values()
    }
    assert KINDS.keys() == ADAPTERS.keys()


def test_header_fields():
    rows = [name for row in table(PAGE, "field") for name in names(row[0])]
    assert tuple(rows) == Header.__struct_fields__


@pytest.mark.parametrize(
    ("start", "want"),
    [
        ("`dtype` is one of ", ITEMSIZE),
        ("`role` is one of ", ROLES),
        (f"Version {header.VERSION} knows ", header.KNOWN_NEEDS),
    ],
)
def test_lists(start, want):
    _, _, rest = PAGE.partition(start)
    found = re.findall(r"[\w]+", re.split(r"[.;:]", rest)[0])
    assert set(found) == set(want)


def test_dtypes_of_raw():
    text = (SPEC / "codecs" / "raw.md").read_text()
    _, _, rest = text.partition("`dtype` MUST be one of ")
    assert set(rest.split(".")[0].split()) == DTYPES.keys()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("`n` MUST be at most 2,097,152", limits.MAX_JSON),
        ("at most 65,536 of `{` and `[`", limits.MAX_OPEN),
        ("and 131,072 commas", limits.MAX_COMMAS),
        ("The header MUST be at most 1,048,576 bytes", limits.MAX_HEADER),
        ("starts at a multiple of 64", limits.ALIGN),
        ("MUST NOT nest deeper than 4 lists", limits.MAX_DEPTH),
        ("MUST NOT have more than 4,096 layers", limits.MANY),
        ("nor more than 4,096 segments", limits.MANY),
        ("at most 4,096 entries", limits.MANY),
        ("nested at most 64 deep", limits.MAX_NESTED),
        ("at most 64 times the bytes", limits.MAX_EXPANSION),
        ("add up to at most 65,536 elements", limits.FREE_ELEMENTS),
        ("`size` at most 64", limits.MAX_SLOTS),
        ("`model.config` MUST have at most 262,144 characters", limits.MAX_CONFIG),
        ("and nest at most 32 deep", limits.MAX_CONFIG_DEPTH),
    ],
)
def test_limits(text, value):
    assert text in " ".join(PAGE.split())
    assert value in [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", text)]


def test_limits_that_are_powers_of_two():
    assert limits.MAX_SIZE == (1 << 48) - 1
    assert "from 0 to 2^48 − 1" in PAGE


def test_version():
    assert PAGE.startswith(f"# The vkv file format, version {header.VERSION}\n")
    shown = json.dumps(framing.metadata(header.VERSION, FileId("…")), ensure_ascii=False)
    assert shown in PAGE


def test_manifest_names_no_rule_that_is_not_on_a_page():
    manifest = json.loads((FIXTURES / "manifest.json").read_text())["files"]
    assert {row["rule"] for row in manifest if "rule" in row} <= RULES
