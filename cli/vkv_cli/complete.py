"""Propose values for the shell: names of codecs, and ids and names in a store. Imports no MLX."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

import vkv


def codec(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the codecs whose names start so, with when to use them as help."""
    from vkv_cli.commands.codecs import GUIDE

    return [
        CompletionItem(name, help=when)
        for name, (_bits, _speed, when) in GUIDE.items()
        if name.startswith(incomplete)
    ]


def entry(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the first digits of the ids, and the names, in the store of ``--store``.

    Nothing where the store cannot be read: a shell has no place for an error.
    """
    store = context.params.get("store")
    if not isinstance(store, vkv.PromptStore) or not store.root.is_dir():
        return []
    try:
        entries = store.ls()
    except (vkv.VkvError, OSError):
        return []
    texts = [(e.id[:12], e.name or e.label) for e in entries]
    texts += [(e.name, e.label) for e in entries if e.name]
    return [
        CompletionItem(text, help=help_) for text, help_ in texts if text.startswith(incomplete)
    ]
