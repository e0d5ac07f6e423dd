"""``vkv explain``, and where messages point to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.rules import rules as on_the_pages
from vkv.tools.explain import rules

ROOT = Path(__file__).parents[2]
BAD = ROOT / "fixtures" / "v1" / "bad"


def test_every_rule_of_the_pages_has_a_cause_and_a_remedy():
    assert rules().keys() == on_the_pages().keys()
    for rule in rules().values():
        for words in (rule.text, rule.cause, rule.remedy):
            assert len(words) >= 10, rule.number
            assert "**" not in words
        assert (ROOT / rule.page).exists()


def test_one_rule(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ran = run("explain", "[c2]")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("C2, spec/v1/format.md\n  `n` MUST be at most 2,097,152.")
    assert "\nWhat usually breaks it\n  " in ran.out
    assert "\nWhat to do\n  " in ran.out
    assert max(map(len, ran.out.splitlines())) <= 60
    assert run("explain", "T14").out.startswith("T14, spec/v1/codecs/tc.md\n")


def test_all_rules_are_listed(run):
    numbers = [line.split()[0] for line in run("explain").out.splitlines()]
    assert numbers == list(rules())
    assert len(run("explain", "--json").out.splitlines()) == len(numbers)


def test_an_unknown_rule(run):
    ran = run("explain", "C99")
    assert ran.status == 1
    assert "no rule 'C99', expected a letter and a number; C has C1, C2" in ran.err
    assert "`vkv explain` lists them" in run("explain", "99").err


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_an_error_says_once_where_its_rule_is_explained(run, command):
    paths = [BAD / "C1-short.vkv", BAD / "C10-escape.vkv"]
    ran = run(command, *paths)
    assert ran.status == 1
    both = ran.out + ran.err
    assert both.count("run `vkv explain") == 1
    assert "; run `vkv explain C1`\n" in both
    assert run(command, paths[1]).status == 1
