"""``vkv inspect``: what files hold and what every byte is spent on. Imports no MLX, no NumPy."""

from __future__ import annotations

import click

import vkv
from vkv.format.info import Info
from vkv_cli import screen, text
from vkv_cli.commands import inspect_layers, inspect_screen
from vkv_cli.files import each_file, files_argument
from vkv_cli.prompt_text import beginning


@click.command()
@files_argument
@click.option("-q", "--quiet", is_flag=True, help="Print only the id of each file.")
@click.option("--layers", is_flag=True, help="Print all: every layer, and bytes by tensor.")
@click.option("--text", "with_text", is_flag=True, help="Print how the prompt begins.")
@click.option(
    "--tokenizer", metavar="DIR", help="For --text; by default that of the model the file names."
)
@text.json_option
def inspect(
    files: tuple[str, ...],
    quiet: bool,
    layers: bool,
    with_text: bool,
    tokenizer: str | None,
    as_json: bool,
) -> int:
    """Show what files hold and what every byte is spent on.

    One screen for a file, a table for several. Reads the header alone: the bytes of the tensors
    are neither read nor checked (see `vkv validate`). A FILE may be a URL: https, s3, hf and
    what else fsspec knows.
    """
    infos: list[Info] = []

    def look(path: str) -> bool:
        info = vkv.inspect(path)
        if as_json:
            text.echo_json(info.to_dict())
        elif quiet:
            click.echo(info.id)
        elif layers:
            click.echo("\n" * bool(infos), nl=False)
            inspect_layers.show(info)
        elif len(files) == 1 or with_text:
            click.echo("\n" * bool(infos), nl=False)
            inspect_screen.show(info, beginning(info, tokenizer) if with_text else None)
        infos.append(info)
        return True

    status = each_file(files, look, as_json)
    if len(files) > 1 and infos and not (as_json or quiet or layers or with_text):
        screen.show(*inspect_screen.table(infos))
    return status
