"""``vkv card``: a README for a model hub, and a picture of the bytes."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv._atomic import replacing
from vkv.errors import VkvError
from vkv.format.container_write import write_all
from vkv.tools.card import PICTURE, picture
from vkv.tools.card import card as card_of
from vkv_cli import text
from vkv_cli.options import local


@click.command()
@click.argument("file")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    callback=local, help=f"Write README.md and {PICTURE} there; neither may exist yet.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace them if they exist.")
def card(file: str, output: Path | None, force: bool) -> None:
    """Write the card of FILE for a model hub: metadata, what it is, how to load it.

    Without -o the card is printed. A path of this machine is never written, a hub id is.
    """
    info = vkv.inspect(file)
    if output is None:
        click.echo(card_of(info), nl=False)
        return
    written = {output / "README.md": card_of(info), output / PICTURE: picture(info)}
    there = [path for path in written if path.exists()]
    if there and not force:
        raise VkvError(f"{there[0]} exists; pass --force to replace it")
    output.mkdir(exist_ok=True)
    for path, words in written.items():
        with replacing(path) as fd:
            write_all(fd, words.encode(), 0)
        click.echo(text.printable(str(path)))
