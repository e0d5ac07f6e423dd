"""``vkv store ls``: entries, sorted and sifted as in ``hf cache ls``. Imports no MLX."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable

import click

import vkv
from vkv.errors import VkvError
from vkv.store import Entry
from vkv.store.local.units import age, size
from vkv_cli.commands.store.common import show, store_option, total
from vkv_cli.text import json_option
from vkv_cli.text import size as size_text

Test = Callable[[Entry], bool]

SORTS = ("used", "size", "created", "tokens", "uses")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise VkvError(f"{text!r} is not a number")
    return int(text)


_NUMBERS: dict[str, Callable[[str], float]] = {
    "size": size, "tokens": _count, "uses": _count, "used": age, "created": age,
}  # fmt: skip
_OPERATORS = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq,
}  # fmt: skip
_FILTER = re.compile(r"\s*(\w+)\s*(>=|<=|>|<|=)\s*(.+?)\s*")


def _parsed(text: str) -> Test:
    """Return the test of an entry that a text like ``size>1GB`` stands for.

    Raises:
        VkvError: Malformed, or of an unknown field.
    """
    parts = _FILTER.fullmatch(text)
    name, sign, value = parts.groups() if parts else ("", "", "")
    if name in _TEXTS and sign == "=":
        return lambda entry: any(value in text for text in _TEXTS[name](entry))
    if name not in _NUMBERS:
        raise VkvError(f"{text!r}: expected size, tokens, uses, used, created, {', '.join(_TEXTS)}")
    limit, compare = _NUMBERS[name](value), _OPERATORS[sign]
    if name in ("used", "created"):  # an age
        now = time.time()
        return lambda entry: compare(now - getattr(entry, name), limit)
    return lambda entry: compare(getattr(entry, name), limit)


_TEXTS: dict[str, Callable[[Entry], tuple[str, ...]]] = {
    "model": lambda entry: (entry.label, entry.model),
    "codec": lambda entry: (entry.codec,),
    "name": lambda entry: (entry.name,),
    "tag": lambda entry: entry.tags,
}


def _filters(_: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Test]:
    try:
        return [_parsed(value) for value in values]
    except VkvError as exc:
        raise click.BadParameter(str(exc), param=param) from None


def _sort(_: click.Context, param: click.Parameter, value: str) -> tuple[str, bool]:
    name, __, order = value.partition(":")
    if name not in SORTS or order not in ("", "asc", "desc"):
        raise click.BadParameter(f"{value!r} is not one of {', '.join(SORTS)}", param=param)
    return name, order != "asc"


@click.command()
@store_option
@click.option(
    "--sort",
    metavar="FIELD[:asc]",
    default="used",
    show_default=True,
    callback=_sort,
    help=f"{', '.join(SORTS)}; the largest or latest first, unless :asc follows.",
)
@click.option(
    "--filter",
    "tests",
    multiple=True,
    metavar="EXPR",
    callback=_filters,
    help='"size>1GB", "tokens>=4096", "uses>0", "used>7d" (not used for longer), "created<1h", '
    '"model=…", "codec=…", "name=…" and "tag=…" (part of it); repeatable.',
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most so many.")
@click.option("-q", "--quiet", is_flag=True, help="Print only ids.")
@json_option
def ls(
    store: vkv.PromptStore,
    sort: tuple[str, bool],
    tests: list[Test],
    limit: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """List entries."""
    name, descending = sort
    found = [entry for entry in store.ls() if all(test(entry) for test in tests)]
    found.sort(key=operator.attrgetter(name), reverse=descending)
    found = found[:limit]
    if quiet:
        for entry in found:
            click.echo(entry.id)
    elif found or as_json:
        show(found, as_json)
    if not (quiet or as_json):
        retained = store.stats().retained
        removed = (
            f"; {size_text(retained)} kept only because others depend on them" if retained else ""
        )
        click.echo(f"{total(found)} in {store.root}{removed}")
