"""``vkv store pin`` and ``unpin``."""

from __future__ import annotations

import click

import vkv
from vkv_cli.commands.store.common import ids_argument, show, store_option, total
from vkv_cli.text import json_option


@click.command()
@ids_argument
@store_option
@json_option
def pin(ids: tuple[str, ...], store: vkv.PromptStore, as_json: bool) -> None:
    """Exempt entries, and what they depend on, from eviction."""
    found = store.pin(*ids)
    show(found, True) if as_json else click.echo(f"pinned {total(found)}")


@click.command()
@ids_argument
@store_option
@json_option
def unpin(ids: tuple[str, ...], store: vkv.PromptStore, as_json: bool) -> None:
    """Let entries be evicted again."""
    found = store.unpin(*ids)
    show(found, True) if as_json else click.echo(f"unpinned {total(found)}")
