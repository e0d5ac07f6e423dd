"""``vkv diff``: what differs between two files."""

from __future__ import annotations

import click

import vkv
from vkv_cli import text
from vkv_cli.group import run
from vkv_cli.options import search_path_option


@click.command(epilog="Exit status: 0 no difference, 1 some, 2 an error; as diff(1) has it.")
@click.argument("a")
@click.argument("b")
@click.option("--deep", is_flag=True, help="Also decode and compare the values.")
@search_path_option
@text.json_option
def diff(a: str, b: str, deep: bool, search_paths: list[str] | None, as_json: bool) -> int:
    """Show what differs between two files: identity, tokens, layers, codecs, stored bytes.

    A summary, then one line a difference: where, then what A has, then what B has.
    Consecutive layers that differ alike share a line.
    """
    run().failure = 2
    found = vkv.diff(a, b, deep=deep, search_paths=search_paths)
    if as_json:
        text.echo_json(found.to_dict())
    elif found.differences:
        click.echo(found.summary)
        table = [("", "A", "B"), *((d.at, d.a, d.b) for d in found.rows())]
        for line in text.table(table):
            click.echo(line)
    else:
        click.echo("no difference" + "; the tensors were not read, --deep does" * (not deep))
    return 0 if found.same else 1
