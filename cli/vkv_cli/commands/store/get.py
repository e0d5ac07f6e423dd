"""``vkv store get``: which entry has the longest prefix of a prompt."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv_cli import text
from vkv_cli.commands.store.common import store_option
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import model_options, output_option, prompt_options
from vkv_cli.prompt_options import PromptOptions


@click.command(epilog="Exit status: 0 found, 1 nothing stored begins like the prompt.")
@model_options(required=True)
@prompt_options()
@store_option
@output_option("-o", "--output", required=False, what="Write the entry to this file")
@text.json_option
def get(
    choice: ModelChoice,
    words: PromptOptions,
    store: vkv.PromptStore,
    output: Path | None,
    as_json: bool,
) -> int:
    """Say which entry has the longest prefix of a prompt, and how many tokens of it.

    The prompt is made as `vkv save` makes it. With -o the entry is written to a file
    that depends on no other, which `vkv generate` goes on from.
    """
    messages = words.read()
    model, tokenizer = load_model(choice)
    tokens = words.tokens(messages, tokenizer)
    found = store.find(tokens, model=model)
    if found is not None and output is not None:
        store.export(found.entry.id, output)
    if as_json:
        covered = found.tokens if found else 0
        entry = found.entry.to_dict() if found else None
        counts = {"prompt": len(tokens), "covered": covered}
        text.echo_json({"schema_version": 1, "entry": entry, "tokens": counts})
    elif found is None:
        click.echo(f"nothing stored begins like these {len(tokens):,} tokens")
    else:
        click.echo(f"{found.entry.id} covers {found.tokens:,} of {len(tokens):,} tokens")
    return 0 if found else 1
