"""``vkv prefill``: the documents of a folder into a store, with one load of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import vkv
from vkv import identity
from vkv.errors import StoreUnavailableError, VkvError
from vkv_cli import quiet, text
from vkv_cli.commands.store.common import count, parents_option, store_option
from vkv_cli.compute import step_size
from vkv_cli.documents import documents
from vkv_cli.group import run
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import CodecChoice, codec_options, model_options, prefill_step_size
from vkv_cli.progress import Bar, Progress, progress
from vkv_cli.prompt_options import PromptOptions, given


@dataclass(frozen=True, slots=True)
class _Job:
    """Hold what is the same for all documents of a run."""

    store: vkv.PromptStore
    model: Any
    tokenizer: Any
    owner: bytes
    options: dict[str, Any]
    step: int
    as_json: bool

    def stored(self, tokens: list[int]) -> str | None:
        """Return the id of the entry that holds all of ``tokens``, if there is one."""
        found = self.store.find([*tokens, 0], model=self.owner)  # all but the last are looked for
        return None if found is None or found.tokens < len(tokens) else found.entry.id

    def put(self, name: str, tokens: list[int], step: Progress) -> str:
        """Compute and store one document; return the id of its entry."""
        prompt = vkv.prefill(self.model, tokens, step=self.step, progress=step)
        owner = {"model": self.model, "tokenizer": self.tokenizer}
        return self.store.put(prompt.cache, tokens, name=name, **owner, **self.options).id

    def say(self, bar: Bar, work: _Work, key: str, done: str) -> None:
        """Print what became of one document."""
        if self.as_json:
            map_ = {"name": work.name, "id": key, "tokens": len(work.tokens), "stored": done}
            bar.say(text.json_line({"schema_version": 1, **map_}))
        else:
            name = text.printable(work.name)
            bar.say(f"{name}: {key[:12]}, {len(work.tokens):,} tokens, {done}")


@dataclass(frozen=True, slots=True)
class _Work:
    """One document and its tokens."""

    name: str
    at: str
    tokens: list[int]


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="DIR|JSONL")
@model_options(required=True)
@store_option
@parents_option
@codec_options()
@click.option("--system-prompt", metavar="TEXT", help="Put before each document; - reads stdin.")
@click.option(
    "--ignore-chat-template", is_flag=True, help="Take each document as it is, as the prompt."
)
@click.option("--tag", "tags", multiple=True, help="A tag for each entry; repeatable.")
@prefill_step_size
@text.json_option
def prefill(
    source: Path,
    choice: ModelChoice,
    store: vkv.PromptStore,
    codecs: CodecChoice,
    system_prompt: str | None,
    ignore_chat_template: bool,
    tags: tuple[str, ...],
    prefill_step_size: int | None,
    as_json: bool,
) -> int:
    """Compute the caches of many documents, and put them into a store.

    The source is a folder of text files, or a file of JSON lines: {"name": "faq", "text": "…"}.
    Each document becomes the beginning of a user's message, which a question can follow;
    its name becomes the name of its entry. The model is loaded once.

    What the store holds already is not computed again, so a run that was interrupted
    goes on where it ended. A document that cannot be read or stored is reported, and does
    not end the run; exit status 1 then. A store that cannot be written ends it.
    """
    if ignore_chat_template and system_prompt is not None:
        raise click.UsageError("--ignore-chat-template leaves no place for --system-prompt.")
    system = None if system_prompt is None else given(system_prompt, "--system-prompt")
    words = PromptOptions(None, None, None, system, ignore_chat_template)
    spec = codecs.spec()
    model, tokenizer = load_model(choice)
    metadata = choice.metadata() | words.metadata()
    options = {"codec": spec, "tags": tags, "metadata": metadata}
    owner, step = identity.model_id(model), step_size(prefill_step_size)
    job = _Job(store, model, tokenizer, owner, options, step, as_json)
    work, bad = _read(source, words, tokenizer)
    bad += _compute(job, work)
    read = count(len(work), "document", "documents")
    click.echo(f"{read} read, {bad:,} failed", err=True)
    return 1 if bad else 0


def _read(source: Path, words: PromptOptions, tokenizer: Any) -> tuple[list[_Work], int]:
    """Return the documents with their tokens, and how many could not be read."""
    work, bad = [], 0
    for document in documents(source):
        try:
            if document.text is None:
                raise VkvError(document.trouble, at=document.at)
            messages = [{"role": "user", "content": document.text}]
            if words.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": words.system_prompt})
            work.append(_Work(document.name, document.at, words.tokens(messages, tokenizer)))
        except VkvError as exc:
            bad += _failed(exc, Bar())
    return work, bad


def _compute(job: _Job, work: list[_Work]) -> int:
    """Compute and store what is not stored; return how many failed.

    Raises:
        StoreUnavailableError, OSError: The store cannot be read or written.
    """
    total, done, bad = sum(len(item.tokens) for item in work), 0, 0
    with progress("computing documents", unit="tokens") as step:
        for item in work:
            try:
                key = job.stored(item.tokens)
                if key is not None:
                    job.say(step, item, key, "was stored")
                else:
                    key = job.put(item.name, item.tokens, _after(step, done, total))
                    job.say(step, item, key, "computed")
            except StoreUnavailableError:
                raise
            except VkvError as exc:
                bad += _failed(exc.of_file(item.at), step)
            done += len(item.tokens)
            step(done, total)
    return bad


def _after(step: Progress, done: int, total: int) -> Progress:
    return lambda part, _: step(done + part, total)


def _failed(exc: VkvError, bar: Bar) -> int:
    """Report a document that failed, and count it."""
    if run().debug:
        raise exc
    bar.say(f"vkv: error: {quiet.one_line(exc)}", err=True)
    return 1
