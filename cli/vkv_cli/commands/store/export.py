"""``vkv store export``: write an entry to a file."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv_cli import complete
from vkv_cli.commands.store.common import store_option
from vkv_cli.options import writable
from vkv_cli.text import json_option
from vkv_cli.written import show_written


@click.command()
@click.argument("key", metavar="ID", shell_complete=complete.entry)
@click.argument("output", metavar="FILE", type=click.Path(path_type=Path), callback=writable)
@store_option
@json_option
def export(key: str, output: Path, store: vkv.PromptStore, as_json: bool) -> None:
    """Write an entry to FILE, which depends on no other file.

    An existing FILE is replaced in one step.
    """
    store.export(key, output)
    show_written(vkv.inspect(output), as_json)
