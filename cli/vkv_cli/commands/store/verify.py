"""``vkv store verify``: every finding, one a line."""

from __future__ import annotations

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import check_there, count, store_option


@click.command(epilog="Exit status: 0 all is in order, 1 there are findings.")
@store_option
@click.option("--deep", is_flag=True, help="Also decode every tensor.")
@text.json_option
def verify(store: vkv.PromptStore, deep: bool, as_json: bool) -> int:
    """Check the index against the files, and every byte of every file.

    Removes nothing: `vkv store gc` and `rm` do.
    """
    check_there(store)
    report = store.verify(deep=deep)
    if as_json:
        text.echo_json(report.to_dict())
        return 0 if report.ok else 1
    for finding in report.findings:
        click.echo(text.printable(str(finding)))
    number = len(report.findings)
    click.echo(f"{store.root}: {count(number, 'finding', 'findings') if number else 'ok'}")
    return 0 if report.ok else 1
