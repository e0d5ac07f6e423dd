"""``vkv store verify``: every finding, one a line."""

from __future__ import annotations

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import check_there, count, store_option


@click.command(epilog="Exit status: 0 all is in order, 1 there are findings.")
@store_option
@click.option("--deep", is_flag=True, help="Also decode every tensor.")
@click.option("--remove", is_flag=True, help="Remove damaged entries, and what depends on them.")
@text.json_option
def verify(store: vkv.PromptStore, deep: bool, remove: bool, as_json: bool) -> int:
    """Check the index against the files, and every byte of every file.

    Removes nothing unless --remove is given. (`vkv store gc` looks at no bytes: it removes
    what is over a limit, gone, or litter.)
    """
    check_there(store)
    before = store.ls() if remove else []
    report = store.verify(deep=deep, remove=remove)
    left = {entry.id for entry in store.ls()} if remove else set()
    removed = [entry for entry in before if entry.id not in left]
    if as_json:
        text.echo_json(report.to_dict() | {"removed": [entry.id for entry in removed]})
        return 0 if report.ok else 1
    for finding in report.findings:
        click.echo(text.printable(str(finding)))
    number = len(report.findings)
    click.echo(f"{store.root}: {count(number, 'finding', 'findings') if number else 'ok'}")
    for entry in removed:
        click.echo(f"removed {entry.id}")
    return 0 if report.ok else 1
