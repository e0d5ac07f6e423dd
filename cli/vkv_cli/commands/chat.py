"""``vkv chat``: a conversation on a file, turn by turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import vkv
from vkv.caches.prompt import Prompt
from vkv.errors import VkvError
from vkv.format.info import Info
from vkv_cli import quiet
from vkv_cli.compute import Sampling
from vkv_cli.models import ModelChoice, load_model, load_prompt
from vkv_cli.options import (
    basis_option,
    model_options,
    output_option,
    sampling_options,
    search_path_option,
)
from vkv_cli.prompt_options import PLAIN
from vkv_cli.written import show_written

HELP = "/save FILE keeps the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command()
@click.argument("file", type=click.Path())
@model_options(note="The one of the file; left out, its name is shown.")
@sampling_options()
@click.option("--ignore-chat-template", is_flag=True, help="Take each line as it is.")
@output_option("--save", required=False, what="Save the conversation to this file at the end")
@search_path_option
@basis_option("of FILE")
def chat(
    file: str,
    choice: ModelChoice,
    sampling: Sampling,
    ignore_chat_template: bool,
    save: Path | None,
    search_paths: list[str] | None,
    basis: Path | None,
) -> None:
    """Go on from FILE in a conversation: each line read is a message of the user.

    The chat template is applied as in `vkv generate`, and each answer streams to stdout.

    \b
    /save FILE   save the conversation so far, in the codecs of the file it began with
    /save        save it to the file of --save, or of the last /save
    /help        show this list
    /quit        end, as Ctrl-D does
    Ctrl-C       stop the answer; what was said stays in the conversation
    """
    info = vkv.inspect(file)
    choice = choice.completed(info.metadata)
    model, tokenizer = load_model(choice)
    options = {"search_paths": search_paths, "basis": basis}
    prompt, _ = load_prompt(file, model=model, tokenizer=tokenizer, **options)
    plain = ignore_chat_template or info.metadata.get(PLAIN) == "true"
    _Talk(prompt, info, choice, model, tokenizer, sampling, plain, save, options).run()


class _Talk:
    """One conversation: what it needs for a turn and for a save."""

    def __init__(
        self,
        prompt: Prompt,
        info: Info,
        choice: ModelChoice,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        plain: bool,
        save: Path | None,
        options: dict[str, Any],
    ):
        self.prompt, self.info, self.choice = prompt, info, choice
        self.model, self.tokenizer, self.plain, self.save_to = model, tokenizer, plain, save
        self.saves_at_end, self.unsaved = save is not None, False
        self.sampling, self.options = sampling, options

    def run(self) -> None:
        """Read and answer lines until there are no more."""
        click.echo(f"{self.prompt.length or 0:,} tokens are in the cache; {HELP}", err=True)
        while (line := _line()) is not None and line.strip() != "/quit":
            try:
                self.act(line)
            except (VkvError, OSError) as exc:  # the conversation outlives a bad line
                print(f"vkv: error: {quiet.one_line(exc)}", file=sys.stderr)
        if self.unsaved and self.saves_at_end:
            self.save("")
        elif self.unsaved:
            click.echo("not saved; /save FILE keeps a conversation", err=True)

    def act(self, line: str) -> None:
        """Do what one line asks for."""
        command, _, rest = line.strip().partition(" ")
        if command == "/save":
            self.save(rest.strip())
        elif command.startswith("/"):
            click.echo(HELP if command == "/help" else f"no command {command}: {HELP}", err=True)
        elif line.strip():
            self.answer(line.strip())

    def answer(self, words: str) -> None:
        """Answer one message; Ctrl-C ends the answer, which stays in the conversation."""
        import mlx.core as mx
        from mlx_lm.sample_utils import make_sampler

        if self.sampling.seed is not None:
            mx.random.seed(self.sampling.seed)
        responses = self.prompt.chat(
            self.model, self.tokenizer, words, template={"plain": True} if self.plain else None,
            max_tokens=self.sampling.max_tokens,
            sampler=make_sampler(self.sampling.temp, self.sampling.top_p),
        )  # fmt: skip
        self.unsaved = True
        try:
            with _stoppable() as asked:
                for response in responses:
                    click.echo(response.text, nl=False)
                    if asked:
                        click.echo(" …", nl=False)
                        break
        finally:
            responses.close()  # type: ignore[attr-defined]  # it is a generator: records the answer
        click.echo()

    def save(self, name: str) -> None:
        """Save the conversation, with the codecs that its file has."""
        path = Path(name) if name else self.save_to
        if path is None:
            raise VkvError("no file to save to: /save FILE")
        info = vkv.save(
            path, self.prompt.cache, tokens=self.prompt.tokens, model=self.model,
            tokenizer=self.tokenizer, codec=self.info.codecs,
            metadata=self.info.metadata | self.choice.metadata(), **self.options,
        )  # fmt: skip
        self.save_to, self.unsaved = path, False
        show_written(info, err=True)


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Note Ctrl-C in the list, for the caller to stop between two tokens; a second one raises.

    An exception in the middle of a step would leave the layers with different numbers of
    tokens, and no conversation could go on from that.
    """
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _line() -> str | None:
    """Return the next line of standard input; ``None`` at its end."""
    if sys.stdin is None:
        return None
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  # input() then edits lines and has a history

            return input("> ")
        line = sys.stdin.readline()
    except EOFError:
        click.echo(err=True)
        return None
    except KeyboardInterrupt:  # at the prompt it drops the line, as in a shell
        click.echo(f"\n{HELP}", err=True)
        return ""
    return line if line else None
