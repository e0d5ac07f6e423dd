"""Errors and warnings as one line each, and no noise from other people's libraries."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click

import vkv
import vkv_cli
from vkv_cli.group import Run
from vkv_cli.text import printable

#: Directories whose warnings are meant for the user.
_OURS = tuple(os.path.join(os.path.dirname(str(m.__file__)), "") for m in (vkv, vkv_cli))
#: Characters of an error: a model that differs in many ways takes as many.
LONGEST = 1800
#: Read by transformers, tokenizers and huggingface_hub when they are imported.
_SILENCE = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def one_line(exc: BaseException) -> str:
    """Return an error as one printable line; a file error in the form ``path: reason``."""
    return printable(_said(exc), LONGEST)


def _said(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror and exc.filename:
        return f"{os.fsdecode(exc.filename)}: {exc.strerror}"
    text = " ".join(str(exc).split())
    if type(exc).__module__ == "builtins" and not isinstance(exc, OSError):
        return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    return text or type(exc).__name__


def where_explained(problem: object, run: Run) -> str:
    """Return what to run for more on the rule of an error or finding; once in a run."""
    rule = getattr(problem, "rule", None)
    if not isinstance(rule, str) or run.explained:
        return ""
    run.explained = True
    return f"; run `vkv explain {rule}`"


def usage_line(exc: click.ClickException) -> str:
    """Return what is wrong with a command line, on one line, and where the help is."""
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "vkv"
    text = " ".join(exc.format_message().split()).rstrip(".")
    return f"{text}{'' if text.endswith('?') else '.'} See `{command} --help`."


def silence_libraries(*, logs: bool = True) -> None:
    """Keep transformers and the hub off stderr. Call before they are imported.

    Args:
        logs: Also silence ``logging``, which is what a server reports with.
    """
    for name, value in _SILENCE.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if logs:
        import logging

        logging.disable(logging.CRITICAL)


@contextmanager
def warnings_as_lines(run: Run) -> Iterator[None]:
    """Show vkv's own warnings as ``vkv: warning: …``; others only with ``--debug``."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        own = issubclass(category, UserWarning) and filename.startswith(_OURS)
        if own or run.debug:
            print(f"vkv: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
