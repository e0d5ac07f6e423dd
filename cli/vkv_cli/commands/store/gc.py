"""``vkv store gc``: make room, and remove what is no use."""

from __future__ import annotations

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import age_option, count, show, size_option, store_option, total


@click.command()
@store_option
@size_option("--max-bytes", "Evict until all files are below, e.g. 20GB.")
@age_option("--max-age", "Evict what nobody used for longer, e.g. 30d.")
@size_option("--min-free", "Evict until so much is free on the disk.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@text.json_option
def gc(
    store: vkv.PromptStore,
    max_bytes: int | None,
    max_age: float | None,
    min_free: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove what is over a limit, what this build cannot read, and litter.

    Evicts what was used longest ago, never what is pinned. Whole files that the index
    does not know are entered.
    """
    found = store.gc(max_bytes=max_bytes, max_age=max_age, min_free=min_free, dry_run=dry_run)
    if as_json:
        text.echo_json(found.to_dict())
        return
    if found.entries:
        show(found.entries, False)
    for path in found.files:
        click.echo(text.printable(str(path)))
    files = f", {count(len(found.files), 'other file', 'other files')}" if found.files else ""
    words = ("would remove", "free") if dry_run else ("removed", "freed")
    click.echo(f"{words[0]} {total(found.entries)}{files}; {words[1]} {text.size(found.freed)}")
    if found.unread:
        click.echo(f"{count(len(found.unread), 'file', 'files')} could not be read now, and stay")
    if found.over:
        click.echo(
            f"still {text.size(found.over)} over the limit: what is left is pinned or stood on"
        )
