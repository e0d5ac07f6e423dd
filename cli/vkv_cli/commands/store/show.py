"""``vkv store show``: one entry. Imports no MLX."""

from __future__ import annotations

import click

import vkv
from vkv_cli import complete, screen, text
from vkv_cli.commands.store.common import since, store_option


@click.command()
@click.argument("key", metavar="ID|NAME", shell_complete=complete.entry)
@store_option
@text.json_option
def show(key: str, store: vkv.PromptStore, as_json: bool) -> None:
    """Show one entry, by its id, the first digits of it, or its name."""
    (entry,) = store.entries(key)
    if as_json:
        text.echo_json({"schema_version": 1, **entry.to_dict()})
        return
    rows = [
        ("id", entry.id),
        ("name", text.printable(entry.name)),
        ("tags", text.printable(", ".join(entry.tags))),
        ("model", f"{text.printable(entry.label)}, {entry.model[:12]}"),
        ("tokens", f"{entry.tokens:,}"),
        ("size", text.exact_size(entry.size)),
        ("codec", text.printable(entry.codec)),
        ("put", since(entry.created)),
        ("used", f"{since(entry.used)}, {entry.uses:,} times"),
        ("pinned", "yes" if entry.pinned else "no"),
        ("depends on", ", ".join(key[:12] for key in entry.dependencies)),
        ("file", text.printable(str(entry.path))),
    ]
    screen.show(screen.columns([row for row in rows if row[1]], wrap=True, styles=("dim",)))
