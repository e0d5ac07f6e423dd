"""``vkv save``: compute a prompt's cache and write it to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import vkv
from vkv_cli import compute
from vkv_cli.checkpoint_options import CheckpointChoice
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import (
    CodecChoice,
    basis_option,
    checkpoint_options,
    codec_options,
    meta_option,
    model_options,
    output_option,
    prefill_step_size,
    prompt_options,
)
from vkv_cli.progress import progress
from vkv_cli.prompt_options import PromptOptions
from vkv_cli.text import json_option
from vkv_cli.written import show_written


@click.command()
@model_options(required=True)
@prompt_options()
@output_option("-o", "--output", "--prompt-cache-file", "output")
@codec_options()
@basis_option()
@meta_option
@click.option("--max-kv-size", type=click.IntRange(1), help="Keep only this many last tokens.")
@click.option("--kv-bits", type=int, help="Quantize the live cache too, with mlx-lm's own class.")
@click.option("--kv-group-size", type=int, default=64, show_default=True, help="For --kv-bits.")
@click.option(
    "--quantized-kv-start",
    type=int,
    default=0,
    show_default=True,
    help="For --kv-bits: the step to begin at. mlx-lm begins at 5000, which leaves shorter "
    "prompts as they are.",
)
@prefill_step_size
@checkpoint_options()
@click.option(
    "--force", is_flag=True, help="Save also where the prompt is too short for the rate of tc."
)
@json_option
def save(
    choice: ModelChoice,
    words: PromptOptions,
    output: Path,
    codecs: CodecChoice,
    basis: Path | None,
    meta: dict[str, str],
    marks: CheckpointChoice,
    force: bool,
    as_json: bool,
    **prefill: Any,
) -> None:
    """Compute a prompt's cache and write it to a file.

    The prompt goes through the model's chat template as in mlx_lm.cache_prompt: a
    user's message stays open, and `vkv generate` continues it; after a system
    prompt alone, or a conversation that ends with an answer, `vkv generate` begins
    the next message.

    A sliding window or recurrent state cannot be cut back to an earlier token. Files of
    such models keep checkpoints, to which `vkv generate --at`, a store and `vkv serve` go back.

    The file appears whole or not at all; an existing one is replaced in one step.
    """
    messages = words.read()
    spec = codecs.spec()
    model, tokenizer = load_model(choice)
    tokens = words.tokens(messages, tokenizer)
    plain = words.ignore_chat_template or not tokenizer.has_chat_template
    cache = compute.prefill(
        model, tokens, marks=marks, messages=None if plain else messages, tokenizer=tokenizer,
        **prefill,
    )  # fmt: skip
    with progress(f"writing {output.name}", unit="bytes") as step:
        info = vkv.save(
            output, cache, tokens=tokens, model=model, tokenizer=tokenizer, codec=spec,
            basis=basis, force=force, metadata=choice.metadata() | words.metadata() | meta,
            progress=step,
        )  # fmt: skip
    show_written(info, as_json)
