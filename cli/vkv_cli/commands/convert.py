"""``vkv convert``: other prompt caches, or other codecs, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import vkv
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import (
    CodecChoice,
    basis_option,
    codec_options,
    meta_option,
    model_options,
    prompt_options,
    search_path_option,
    writable,
)
from vkv_cli.progress import progress
from vkv_cli.prompt_options import PromptOptions
from vkv_cli.text import json_option
from vkv_cli.written import show_written


@click.command()
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path), callback=writable)
@codec_options()
@basis_option()
@click.option(
    "--inline",
    is_flag=True,
    help="Encode nothing: copy IN and what it refers to in other files into OUT.",
)
@click.option(
    "--force", is_flag=True, help="Convert also where the prompt is too short for the rate of tc."
)
@search_path_option
@meta_option
@model_options(note="Recorded in the file, so that loading can check it.")
@prompt_options()
@json_option
def convert(
    source: str,
    output: Path,
    codecs: CodecChoice,
    basis: Path | None,
    inline: bool,
    force: bool,
    search_paths: list[str] | None,
    meta: dict[str, str],
    choice: ModelChoice,
    words: PromptOptions,
    as_json: bool,
) -> None:
    """Turn IN into the .vkv file OUT.

    IN is a prompt cache of mlx-lm, of 0.31 or 0.32, or a .vkv file. A prompt cache
    names neither the weights nor the tokens it was made from: --model and the
    prompt (as for `vkv save`) add them. Of these the number of layers, of KV heads and
    of tokens is checked, and no more: only computing the prompt again could tell whether
    it is the one.

    OUT appears whole or not at all; an existing file is replaced in one step.
    """
    if inline:
        if codecs.given or basis or words.given or choice.model is not None:
            raise click.UsageError(
                "--inline copies IN as it is; it goes with --search-path and --meta alone."
            )
        info = vkv.convert(
            source, output, inline=True, metadata=meta or None, search_paths=search_paths
        )
        show_written(info, as_json)
        return
    spec = codecs.spec()
    owner: dict[str, Any] = {}
    if words.given:
        if choice.model is None:
            raise click.UsageError("a prompt needs --model, whose tokenizer makes its tokens.")
        messages = words.read()
    if choice.model is not None:
        owner["model"], owner["tokenizer"] = load_model(choice)
        meta = choice.metadata() | words.metadata() | meta
    if words.given:
        owner["tokens"] = words.tokens(messages, owner["tokenizer"])
    with progress(f"writing {output.name}", unit="bytes") as step:
        info = vkv.convert(
            source,
            output,
            codec=spec,
            metadata=meta or None,
            search_paths=search_paths,
            basis=basis,
            force=force,
            progress=step,
            **owner,
        )
    show_written(info, as_json)
