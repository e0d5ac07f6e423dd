"""``vkv store rm``: remove entries."""

from __future__ import annotations

import sys

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import ids_argument, show, store_option, total
from vkv_cli.text import json_option


@click.command()
@ids_argument
@store_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def rm(
    ids: tuple[str, ...], store: vkv.PromptStore, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove entries, also pinned ones; all or none.

    The bytes of a file that others depend on stay until those are gone.
    """
    if not (yes or dry_run):
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError("not a terminal: pass --yes to confirm.")
        show(store.entries(*ids), False)
        click.confirm("Remove?", abort=True, err=True)
    found = store.rm(*ids, dry_run=dry_run)
    if as_json:
        show(found.entries, True)
        return
    words = ("would remove", "free") if dry_run else ("removed", "freed")
    own = sum(entry.size for entry in found.entries)
    stays = f"; {text.size(own - found.freed)} stay: others depend on them" * (own > found.freed)
    freed = f"{words[1]} {text.size(found.freed)}"
    click.echo(f"{words[0]} {total(found.entries)}; {freed}{stays}")
