"""``vkv convert``: other prompt caches, or other codecs, to a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

import vkv
from vkv.sources.urls import is_url, name_of
from vkv_cli.files import each_file
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import (
    CodecChoice,
    basis_option,
    codec_options,
    local,
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
@click.argument("paths", metavar="IN... [OUT|DIR]", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="OUT|DIR",
    type=click.Path(path_type=Path),
    help="The file or folder to write, instead of as the last argument.",
)
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
    paths: tuple[str, ...],
    output: Path | None,
    codecs: CodecChoice,
    basis: Path | None,
    inline: bool,
    force: bool,
    search_paths: list[str] | None,
    meta: dict[str, str],
    choice: ModelChoice,
    words: PromptOptions,
    as_json: bool,
) -> int:
    """Turn IN into the .vkv file OUT, or each IN into a file of the folder DIR.

    IN is a prompt cache of mlx-lm, of 0.31 or 0.32, or a .vkv file. A prompt cache
    names neither the weights nor the tokens it was made from: --model and the
    prompt (as for `vkv save`) add them. Of these the number of layers, of KV heads and
    of tokens is checked, and no more: only computing the prompt again could tell whether
    it is the one.

    OUT appears whole or not at all; an existing file is replaced in one step, and OUT may
    be IN itself, which the result then replaces. In DIR
    files keep their names, with the suffix .vkv; one that cannot be converted does not
    keep the others from it.
    """
    sources, output = _split(paths, output)
    targets = _targets(sources, output)
    if words.given and len(sources) > 1:
        raise click.UsageError("a prompt is that of one file: convert it by itself.")
    options: dict[str, Any] = {"search_paths": search_paths}
    if inline:
        if codecs.given or basis or words.given or choice.model is not None:
            raise click.UsageError(
                "--inline copies IN as it is; it goes with --search-path and --meta alone."
            )
        options |= {"inline": True}
    else:
        options |= {"codec": codecs.spec(), "basis": basis, "force": force}
        owner, recorded = _owner(choice, words)
        options |= owner
        meta = recorded | meta
    options["metadata"] = meta or None

    def one(source: str) -> bool:
        target = targets[source]
        with progress(f"writing {target.name}", unit="" if inline else "bytes") as step:
            given = options if inline else options | {"progress": step}
            info = vkv.convert(source, target, **given)
        show_written(info, as_json)
        return True

    return int(not one(sources[0])) if len(sources) == 1 else each_file(sources, one, as_json)


def _split(paths: tuple[str, ...], output: Path | None) -> tuple[tuple[str, ...], Path]:
    """Return what to convert and where to: the last path, if ``--output`` is not given.

    Raises:
        click.UsageError: There is no output, or it is a URL.
    """
    sources, output = (paths, output) if output else (paths[:-1], Path(paths[-1]))
    if not sources:
        raise click.UsageError("Missing argument 'OUT|DIR': give it last, or with --output.")
    local(click.get_current_context(), _output(), output)
    return sources, output


def _output() -> click.Parameter:
    return next(p for p in click.get_current_context().command.params if p.name == "output")


def _targets(sources: tuple[str, ...], output: Path) -> dict[str, Path]:
    """Return the file to write for each source.

    Raises:
        click.UsageError: Several would become one file, or a source would be replaced by another.
    """
    if not output.is_dir():
        if len(sources) > 1:
            raise click.UsageError(f"several files need a folder, and '{output}' is none.")
        writable(click.get_current_context(), _output(), output)
        return {sources[0]: output}
    names = {source: _name(source) for source in sources}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise click.UsageError(f"several files would become '{output / twice[0]}'.")
    targets = {source: output / name for source, name in names.items()}
    mine = {Path(source).resolve() for source in sources if not is_url(source)}
    for target in targets.values():
        if target.resolve() in mine:
            raise click.UsageError(f"'{target}' is one of the files to convert: choose a folder.")
    return targets


def _name(source: str) -> str:
    name = name_of(source) if is_url(source) else Path(source).name
    for suffix in (".safetensors", ".vkv"):
        name = name.removesuffix(suffix)
    return f"{name}.vkv"


def _owner(choice: ModelChoice, words: PromptOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """Return model, tokenizer and tokens for ``vkv.convert``, and metadata that names them."""
    if words.given and choice.model is None:
        raise click.UsageError("a prompt needs --model, whose tokenizer makes its tokens.")
    messages = words.read() if words.given else None
    if choice.model is None:
        return {}, {}
    model, tokenizer = load_model(choice)
    owner = {"model": model, "tokenizer": tokenizer}
    if messages is not None:
        owner["tokens"] = words.tokens(messages, tokenizer)
    return owner, choice.metadata() | words.metadata()
