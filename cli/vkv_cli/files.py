"""Commands that look at several files, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from vkv.errors import VkvError
from vkv_cli import quiet, text
from vkv_cli.group import run

files_argument = click.argument("files", nargs=-1, required=True, metavar="FILE...")


def each_file(files: tuple[str, ...], look: Callable[[str], bool], as_json: bool = False) -> int:
    """Call ``look`` on every file; one that fails does not hide the next.

    With ``as_json`` every file gives an object, those that cannot be read too.

    Returns:
        Exit status: 1 if a file could not be read, or ``look`` said no to it.
    """
    if len(files) == 1 and not as_json:
        return 0 if look(files[0]) else 1
    good = True
    for path in files:
        try:
            good &= look(path)
        except BrokenPipeError:
            raise
        except (VkvError, OSError) as exc:
            if run().debug:
                raise
            if as_json:
                line = quiet.one_line(exc)
                text.echo_json({"schema_version": 1, "path": path, "error": line})
            sys.stdout.flush()  # keep the order of lines where both go to one place
            hint = quiet.where_explained(exc, run())
            print(f"vkv: error: {quiet.one_line(exc)}{hint}", file=sys.stderr)
            good = False
    return 0 if good else 1
