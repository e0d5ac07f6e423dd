"""Options that several commands share, named as mlx-lm names them.

Each group of options reaches its command as one dataclass.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from vkv.errors import VkvError
from vkv.sources.urls import is_url
from vkv_cli import complete
from vkv_cli.checkpoint_options import (
    CheckpointChoice,
    checkpoints_option,
    every_option,
    share_option,
)
from vkv_cli.compute import Sampling
from vkv_cli.models import ModelChoice
from vkv_cli.prompt_options import PromptOptions

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _gather(name: str, into: type[Any], *options: Decorator) -> Decorator:
    """Add ``options`` to a command and hand it one ``into`` as argument ``name``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **given: Any) -> Any:
            own = {f.name: given.pop(f.name) for f in fields(into)}
            return function(*args, **given, **{name: into(**own)})

        decorated: Callable[..., Any] = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def model_options(*, required: bool = False, note: str = "") -> Decorator:
    """Add the options of ``choice: ModelChoice``."""
    text = "A local directory, or a repository on the Hugging Face hub."
    return _gather(
        "choice",
        ModelChoice,
        click.option("--model", required=required, help=f"{text} {note}".strip()),
        click.option("--adapter-path", help="Trained adapter weights and config."),
        click.option(
            "--trust-remote-code", is_flag=True, help="Let the model run its repository's code."
        ),
        click.option("--eos-token", help="End-of-sequence token for the tokenizer."),
    )


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """``--codec``, ``--keys`` and ``--values``."""

    codec: str | None
    keys: str | None
    values: str | None

    @property
    def given(self) -> bool:
        return any((self.codec, self.keys, self.values))

    def spec(self, default: str | dict[str, str] = "raw") -> str | dict[str, str]:
        """Return ``codec`` of ``vkv.save``; a bad one is refused before any work is done.

        Raises:
            click.UsageError: A codec string is refused.
        """
        base = {"keys": default, "values": default} if isinstance(default, str) else default
        own = {"keys": self.keys or self.codec, "values": self.values or self.codec}
        spec = {name: text or base[name] for name, text in own.items()}
        from vkv.caches.saving.request import codec_pair  # brings MLX

        try:
            codec_pair(spec)
        except VkvError as exc:
            raise click.UsageError(str(exc)) from None
        return spec["keys"] if spec["keys"] == spec["values"] else spec


def codec_options(default: str = "raw", note: str = "") -> Decorator:
    """Add the options of ``codecs: CodecChoice``."""
    named = functools.partial(click.option, metavar="CODEC", shell_complete=complete.codec)
    text = f"Codec, e.g. affine:bits=4,group=64; `vkv codecs` lists them. {note}".strip()
    return _gather(
        "codecs",
        CodecChoice,
        named("--codec", help=f"{text}  [default: {default}]"),
        named("--keys", help="Codec of the keys alone."),
        named("--values", help="Codec of the values alone."),
    )


def checkpoint_options() -> Decorator:
    """Add the options of ``marks: CheckpointChoice``."""
    return _gather("marks", CheckpointChoice, checkpoints_option, every_option, share_option)


def basis_option(note: str = "") -> Decorator:
    """Add the option of ``basis: Path | None``."""
    text = f"A file of `vkv train-basis`{', ' * bool(note)}{note}: codec tc refers to its axes."
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--basis", type=kind, metavar="FILE", help=text)


def sampling_options() -> Decorator:
    """Add the options of ``sampling: Sampling``."""
    return _gather(
        "sampling",
        Sampling,
        click.option(
            "-m", "--max-tokens", type=int, default=100, show_default=True, callback=_not_zero,
            help="Generate at most so many; -1 for no limit.",
        ),
        click.option(
            "--temp", type=click.FloatRange(0), default=0.0, show_default=True, callback=_number,
            help="Sampling temperature; 0 takes the most likely token.",
        ),
        click.option(
            "--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True,
            help="Sample from the most likely tokens of this total probability.",
        ),
        click.option(
            "--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of the random numbers."
        ),
        prefill_step_size,
    )  # fmt: skip


def _number(_: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number", param=param)
    return value


def _not_zero(_: click.Context, param: click.Parameter, value: int) -> int:
    if value == 0 or value < -1:
        raise click.BadParameter(f"{value} is neither positive nor -1", param=param)
    return value


prefill_step_size = click.option(
    "--prefill-step-size",
    type=click.IntRange(1),
    help="Prompt tokens to process at a time.  [default: 2048; 256 on a CPU]",
)

_FILE = click.Path(dir_okay=False, path_type=Path)


def prompt_options() -> Decorator:
    """Add the options of ``words: PromptOptions``."""
    return _gather(
        "words",
        PromptOptions,
        click.option("-p", "--prompt", metavar="TEXT", help="The user's message; - reads stdin."),
        click.option(
            "--prompt-file", type=_FILE, metavar="FILE", help="The same from a file; - is stdin."
        ),
        click.option(
            "--messages", type=_FILE, metavar="FILE",
            help='A conversation: a JSON list of {"role": …, "content": …}; - is stdin.',
        ),
        click.option("--system-prompt", metavar="TEXT", help="System prompt for the template."),
        click.option(
            "--ignore-chat-template", is_flag=True, help="Take the prompt as it is."
        ),
    )  # fmt: skip


def _pairs(_: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not key=value", param=param)
        if key in found:
            raise click.BadParameter(f"{key!r} is given twice", param=param)
        found[key] = value
    return found


meta_option = click.option(
    "--meta", multiple=True, metavar="KEY=VALUE", callback=_pairs, help="Metadata; repeatable."
)


def _search_paths(
    _: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> list[str] | None:
    for place in value:
        if not is_url(place) and not os.path.exists(place):
            raise click.BadParameter(f"Path '{place}' does not exist.", param=param)
    return list(value) or None


search_path_option = click.option(
    "--search-path", "search_paths", multiple=True, metavar="PATH", callback=_search_paths,
    help="A file or folder to look in for the files this one depends on; repeatable.  "
    "[default: its own folder]",
)  # fmt: skip


def local(_: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a URL as a place to write; as a path it has one slash left."""
    if value is not None and (scheme := re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(value))):
        text = f"{scheme[0]}/… is a URL, which can only be read; `vkv push` sends files"
        raise click.BadParameter(text, param=param)
    return value


def writable(_: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse now what could not be written after minutes of work."""
    if value is None:
        return None
    local(_, param, value)
    if not value.parent.is_dir():
        raise click.BadParameter(f"directory '{value.parent}' does not exist", param=param)
    if value.is_dir():
        raise click.BadParameter(f"'{value}' is a directory", param=param)
    if not os.access(value.parent, os.W_OK):
        raise click.BadParameter(f"directory '{value.parent}' is not writable", param=param)
    return value


def output_option(*names: str, required: bool = True, what: str = "The file to write") -> Decorator:
    """Add the option of a file to write; an existing file is replaced in one step."""
    return click.option(
        *names,
        required=required,
        type=click.Path(path_type=Path),
        metavar="FILE",
        callback=writable,
        help=f"{what}; an existing one is replaced in one step.",
    )
