"""The entry point: the table of commands, and the one place where errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from vkv._version import __version__
from vkv.errors import VkvError
from vkv_cli import quiet, streams
from vkv_cli.group import LazyGroup, Run
from vkv_cli.text import printable

#: Name -> (module:attribute, the line in ``vkv --help``). A command is one file and one row.
COMMANDS = {
    "save": ("save:save", "Compute a prompt's cache and write it to a file."),
    "generate": ("generate:generate", "Go on from a file with a new prompt."),
    "inspect": ("inspect:inspect", "Show what files hold and what every byte is spent on."),
    "view": ("view:view", "Show files, or a store, as a page in the browser."),
    "validate": ("validate:validate", "Check files and list every finding."),
    "convert": (
        "convert:convert",
        "Turn an mlx-lm prompt cache, or a .vkv file, into a .vkv file.",
    ),
    "explain": ("explain:explain", "Explain a rule that a message names."),
    "card": ("card:card", "Write a README for a model hub, with a picture."),
    "diff": ("diff:diff", "Show what differs between two files."),
    "chat": ("chat:chat", "Go on from a file in a conversation, turn by turn."),
    "prefill": ("prefill:prefill", "Put the documents of a folder into a store."),
    "push": ("transfer:push", "Send a file to a URL (s3://, hf:// and others)."),
    "pull": ("transfer:pull", "Fetch a file from a URL, checked before it takes its name."),
    "store": ("store:store", "Keep prompts on this machine and find them again."),
    "codecs": ("codecs:codecs", "List the codecs and their options."),
    "serve": ("serve:serve", "Serve a model over HTTP; prompts survive a restart."),
    "train-basis": (
        "train_basis:train_basis",
        "Learn from texts how to compress the caches of one model.",
    ),
    "bench": ("bench:bench", "Measure rate, quality and speed of codecs on a model."),
    "demo": ("demo:demo", "Save, inspect and resume a prompt of a real model."),
}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 an error, 2 wrong usage, 130 interrupted.",
)
@click.version_option(__version__, message="vkv %(version)s")
def cli() -> None:
    """Save, inspect and resume the KV caches of language models."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        args: Without the program's name; those of the process by default.
    """
    run = Run()
    streams.open_missing()
    try:
        with quiet.warnings_as_lines(run):
            result = cli.main(args, prog_name="vkv", standalone_mode=False, obj=run)
        sys.stdout.flush()
    except Exception as exc:
        return _report(exc, run)
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


def _report(exc: Exception, run: Run) -> int:
    """Say in one line what went wrong; return the exit status."""
    if isinstance(exc, click.Abort):
        return 130
    if isinstance(exc, BrokenPipeError):
        # The reader has gone (`vkv inspect x | head`); nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return run.failure
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        exc.show()
        return exc.exit_code
    if isinstance(exc, click.ClickException):
        print(f"vkv: error: {quiet.usage_line(exc)}", file=sys.stderr)
        return exc.exit_code
    if run.debug:
        import traceback  # not needed in good runs, which should start fast

        for line in "".join(traceback.format_exception(exc)).splitlines():
            print(printable(line), file=sys.stderr)
    print(f"vkv: error: {quiet.one_line(exc)}{quiet.where_explained(exc, run)}", file=sys.stderr)
    if not isinstance(exc, VkvError | OSError) and not run.debug:
        print("vkv: this is a fault in vkv; --debug shows where", file=sys.stderr)
    return run.failure
