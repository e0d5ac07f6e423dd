"""``vkv diff``: what differs between two files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import vkv
from vkv.tools.distance import Distance, total
from vkv_cli import screen, text
from vkv_cli.group import run
from vkv_cli.options import search_path_option

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command(epilog="Exit status: 0 no difference, 1 some, 2 an error; as diff(1) has it.")
@click.argument("a")
@click.argument("b")
@click.option("--deep", is_flag=True, help="Also decode and compare the values.")
@search_path_option
@text.json_option
def diff(a: str, b: str, deep: bool, search_paths: list[str] | None, as_json: bool) -> int:
    """Show what differs between two files: identity, tokens, layers, codecs, stored bytes.

    A summary, then one line a difference: where, then what A has, then what B has.
    Consecutive layers that differ alike share a line. With --deep, a table of layers, the
    worst first: relative squared error and largest difference, A being the reference.
    """
    run().failure = 2
    found = vkv.diff(a, b, deep=deep, search_paths=search_paths)
    if as_json:
        text.echo_json(found.to_dict())
        return 0 if found.same else 1
    screen.show(*parts(found))
    return 0 if found.same else 1


def parts(found: vkv.Diff) -> list[RenderableType]:
    """Return what is printed of the differences of two files."""
    checked = (
        "digests checked: of every tensor that was decoded"
        if found.deep
        else "digests not checked; `vkv validate` does, and --deep compares values"
    )
    if found.same:
        return ["no difference", checked]
    rows = [("", "A", "B"), *((d.at, d.a, d.b) for d in found.rows())]
    table = [screen.columns(rows, header=True, cut=(1, 2))] if len(rows) > 1 else []
    return [found.summary, *table, *_values(found.distances), checked]


def _values(found: list[Distance]) -> list[RenderableType]:
    """Return a table of layers and tensors, the worst layer first, and the total."""
    layers: dict[str, dict[str, Distance]] = {}
    for distance in found:
        layers.setdefault(distance.at, {})[distance.name] = distance
    worst = sorted(layers.items(), key=lambda item: -max(d.error for d in item[1].values()))
    differ = [(at, own) for at, own in worst if any(map(str, own.values()))]
    if not differ:
        return ["the values are the same"] if found else []
    names = sorted({d.name for d in found})
    rows = [["LAYER", *(x for n in names for x in (n.upper(), "LARGEST"))]]
    rows += [[at, *(x for n in names for x in _cells(own.get(n)))] for at, own in differ]
    sums = [total([d for d in found if d.name == n]) for n in names]
    rows.append(["total", *(x for largest, error in sums for x in _pair(error, largest))])
    largest, error = total(found)
    same = len(layers) - len(differ)
    rest = f"; {same} layer{'s' * (same != 1)} the same" * bool(same)
    return [
        "",
        screen.columns(rows, header=True, right=range(1, len(rows[0])), cut=(0,)),
        f"relative squared error {error:.3g}, largest difference {largest:.4g}{rest}",
    ]


def _cells(distance: Distance | None) -> tuple[str, str]:
    if distance is None:
        return "", ""
    if distance.shapes:
        return "shapes", "differ"
    return _pair(distance.error, distance.largest)


def _pair(error: float, largest: float) -> tuple[str, str]:
    return (f"{error:.3g}", f"{largest:.4g}") if largest else ("same", "")
