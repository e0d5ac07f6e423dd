"""``vkv store reindex``: build a new index."""

from __future__ import annotations

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import count, store_option


@click.command()
@store_option
@text.json_option
def reindex(store: vkv.PromptStore, as_json: bool) -> None:
    """Build a new index from the files.

    Pins and times of use, which no file records, are kept as far as the old index can
    be read.
    """
    left = store.reindex()
    entries = store.stats().entries
    if as_json:
        files = [str(path) for path in left]
        text.echo_json({"schema_version": 1, "entries": entries, "not_entered": files})
        return
    for path in left:
        click.echo(f"not entered: {text.printable(str(path))}")
    click.echo(f"{store.root}: {count(entries, 'entry', 'entries')}")
