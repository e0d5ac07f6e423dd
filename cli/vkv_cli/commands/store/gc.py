"""``vkv store gc``: make room, and remove what is of no use."""

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
    done = store.gc(max_bytes=max_bytes, max_age=max_age, min_free=min_free, dry_run=dry_run)
    if as_json:
        text.echo_json(done.to_dict())
        return
    if done.entries:
        show(done.entries, False)
    for path in done.files:
        click.echo(text.printable(str(path)))
    files = f", {count(len(done.files), 'other file', 'other files')}" if done.files else ""
    words = ("would remove", "free") if dry_run else ("removed", "freed")
    click.echo(f"{words[0]} {total(done.entries)}{files}; {words[1]} {text.size(done.freed)}")
    if done.unread:
        click.echo(f"{count(len(done.unread), 'file', 'files')} could not be read now, and stay")
    if done.over:
        click.echo(f"still {text.size(done.over)} over the limit: the rest is pinned or needed")
