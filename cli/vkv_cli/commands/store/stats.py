"""``vkv store stats``: how much there is. Imports no MLX."""

from __future__ import annotations

import click

import vkv
from vkv_cli import screen, text
from vkv_cli.commands.store.common import count, store_option


@click.command()
@store_option
@text.json_option
def stats(store: vkv.PromptStore, as_json: bool) -> None:
    """Say how much there is."""
    found = store.stats()
    if as_json:
        text.echo_json(found.to_dict())
        return
    models = count(found.models, "model", "models")
    rows = [
        ("store", text.printable(str(found.root))),
        ("entries", f"{found.entries:,}, of {models}, {count(found.tokens, 'token', 'tokens')}"),
        ("size", text.exact_size(found.bytes)),
        ("pinned", text.size(found.pinned)),
        ("removed, but needed", text.size(found.retained)),
        ("put aside", text.size(found.quarantined)),
    ]
    screen.show(screen.columns(rows, wrap=True, styles=("dim",)))
