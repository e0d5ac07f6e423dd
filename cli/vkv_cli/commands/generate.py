"""``vkv generate``: go on from a file with a new prompt."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

import vkv
from vkv.caches.checkpoints.cap import SHARE, with_checkpoint
from vkv.format.file_id import FileId
from vkv.format.info import Info
from vkv.format.target import check_target
from vkv_cli import text
from vkv_cli.checkpoint_options import share_option
from vkv_cli.compute import Answer, Sampling, answer
from vkv_cli.models import ModelChoice, load_model, load_prompt
from vkv_cli.options import (
    CodecChoice,
    basis_option,
    codec_options,
    meta_option,
    model_options,
    output_option,
    sampling_options,
    search_path_option,
)
from vkv_cli.prompt_options import PLAIN, given
from vkv_cli.written import show_written

if TYPE_CHECKING:
    from vkv.caches.loading.load import LiveForm


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "-p", "--prompt", required=True, metavar="TEXT", help="The user's message; - reads stdin."
)
@model_options(note="The one of the file; left out, its name is shown.")
@sampling_options()
@click.option("--ignore-chat-template", is_flag=True, help="Take the prompt as it is.")
@click.option(
    "--live",
    type=click.Choice(["dense", "packed"]),
    default="dense",
    show_default=True,
    help="Caches in memory: mlx-lm's own, or the file's codes, decoded at every step.",
)
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="N",
    help="Go on from the first N tokens of FILE, or from its last checkpoint before.",
)
@click.option("--force", is_flag=True, help="Go on in spite of another model or tokenizer.")
@output_option("--save", required=False, what="Save the grown cache to this file")
@click.option(
    "--incremental",
    is_flag=True,
    help="--save only what FILE does not hold; the new file cannot be read without it.",
)
@click.option(
    "--checkpoints",
    type=click.Choice(["messages", "none"]),
    default="messages",
    show_default=True,
    help="For --save, where a cache cannot be cut: keep one at the end of the last message too.",
)
@share_option
@search_path_option
@codec_options(default="the file's own", note="For --save.")
@basis_option("of FILE, or for --save")
@meta_option
@click.option(
    "--verbose", type=bool, default=True, show_default=True, help="Print statistics to stderr."
)
@text.json_option
def generate(
    file: str,
    prompt: str,
    choice: ModelChoice,
    sampling: Sampling,
    ignore_chat_template: bool,
    live: LiveForm,
    at: int | None,
    force: bool,
    save: Path | None,
    incremental: bool,
    checkpoints: str,
    checkpoint_share: float | None,
    search_paths: list[str] | None,
    codecs: CodecChoice,
    basis: Path | None,
    meta: dict[str, str],
    verbose: bool,
    as_json: bool,
) -> None:
    """Go on from FILE with a new prompt, without computing again what it holds.

    The prompt continues the file's last message if that is one of the user and
    open, and else is the next message; the chat template is applied as in
    mlx_lm.generate. The answer streams to stdout.

    With --save the file, the prompt and the answer are saved together. Codes of FILE
    stay as they are; --codec is for what is new, and for what FILE holds raw.
    """
    if save is None and (incremental or codecs.given or meta):
        raise click.UsageError("--incremental, --codec and --meta are for --save.")
    info = vkv.inspect(file)
    spec = codecs.spec(info.codecs)
    if save is not None:  # before the model is loaded, not after the answer
        needed = [*info.dependencies, *([info.id] if incremental else [])]
        check_target(save, map(FileId, needed))
    choice = choice.completed(info.metadata)
    words = given(prompt, "--prompt")
    model, tokenizer = load_model(choice)
    owner = {"model": model, "tokenizer": tokenizer}
    loaded, reading = load_prompt(
        file, **owner, live=live, at=at, force=force, search_paths=search_paths, basis=basis
    )
    plain = ignore_chat_template or info.metadata.get(PLAIN) == "true"
    rest = loaded.turn(tokenizer, words, plain=plain)
    reused = len(loaded.tokens or [])
    if save is not None and checkpoints == "messages":
        loaded.cache = with_checkpoint(loaded.cache, loaded.tokens or [], message=True)
    found = answer(loaded.cache, rest, model, tokenizer, sampling, reused, echo=not as_json)
    loaded.extend(found.tokens)
    saved = None
    if save is not None:
        metadata = info.metadata | choice.metadata() | meta
        saved = vkv.save(
            save,
            loaded.cache,
            tokens=loaded.tokens,
            codec=spec,
            metadata=metadata,
            parent=file if incremental else None,
            search_paths=search_paths,
            basis=basis,
            checkpoints=checkpoints == "messages",
            checkpoint_share=SHARE if checkpoint_share is None else checkpoint_share,
            **owner,
        )
        if incremental and not saved.dependencies:
            warnings.warn(
                f"{file} holds no leading tokens in {spec}: {save} is whole", stacklevel=1
            )
    if as_json:
        extra = {
            "seconds_to_read": reading,
            "notes": loaded.notes,
            "saved": saved and saved.to_dict(),
        }
        text.echo_json(found.to_dict() | extra)
    elif verbose:
        _show(found, reading, loaded.notes, saved)


def _show(found: Answer, reading: float, notes: list[str], saved: Info | None) -> None:
    total = reading + found.seconds
    lines = (
        f"Prompt: {found.reused} tokens reused, {found.computed} computed",
        f"Generation: {len(found.tokens)} tokens, {found.rate:.3f} tokens-per-sec",
        f"Time to first token: {total:.3f} s, of which {reading:.3f} s to read the file",
        *(f"Note: {note}" for note in notes),
    )
    click.echo("\n".join(lines), err=True)
    if saved is not None:
        show_written(saved, err=True)
