"""``vkv view``: files, or a store, as a page."""

from __future__ import annotations

import os
import re
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import click

import vkv
from vkv._atomic import replacing
from vkv.format.container_write import write_all
from vkv.sources.urls import is_url
from vkv_cli import text
from vkv_cli.commands.store.common import check_there
from vkv_cli.options import output_option
from vkv_cli.prompt_text import beginning

_ID = re.compile(r"[0-9a-f]{4,64}")


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="FILE|URL|STORE|ID...")
@output_option("-o", "--output", required=False, what="The page to write; nothing is opened then")
@click.option("--text", "with_text", is_flag=True, help="Show how the prompt begins.")
@click.option(
    "--tokenizer", metavar="DIR", help="For --text; by default that of the model the file names."
)
def view(
    targets: tuple[str, ...], output: Path | None, with_text: bool, tokenizer: str | None
) -> None:
    """Show a file, what differs between two, or a store, as a page in the browser.

    The page is one HTML file that loads nothing from anywhere. It checks the id of each file by
    itself. The bytes of the tensors are neither read nor checked (see `vkv validate`). An ID is
    that of an entry of the default store, or how it begins.
    """
    from vkv_cli.view.page import page

    if len(targets) > 2:
        raise click.UsageError(f"{len(targets)} files, expected one, or two to compare")
    content = _content(targets, with_text, tokenizer)
    written = page(content).encode()
    if output is not None:
        with replacing(output) as file:
            write_all(file, written, 0)
        click.echo(f"{text.printable(os.fspath(output))}: {len(written):,} bytes")
        return
    handle, name = tempfile.mkstemp(prefix="vkv-view-", suffix=".html")
    write_all(handle, written, 0)
    os.close(handle)
    click.echo(text.printable(name))
    if not webbrowser.open(Path(name).as_uri()):
        click.echo("no browser was found here: open that file in one")


def _content(targets: tuple[str, ...], with_text: bool, tokenizer: str | None) -> dict[str, Any]:
    from vkv_cli.view.page import file_data, store_data

    if len(targets) == 1 and not is_url(targets[0]) and os.path.isdir(targets[0]):
        store = vkv.PromptStore(targets[0])
        check_there(store)
        return {"store": store_data(store)}
    paths = [_located(target) for target in targets]
    texts = [beginning(vkv.inspect(p), tokenizer) if with_text else None for p in paths]
    return {"files": [file_data(path, words) for path, words in zip(paths, texts, strict=True)]}


def _located(target: str) -> str:
    """Return the path or URL of a file; an id, or its beginning, is that of a store's entry."""
    if is_url(target) or os.path.lexists(target) or not _ID.fullmatch(target):
        return target
    store = vkv.PromptStore()
    check_there(store)
    (entry,) = store.entries(target)
    return os.fspath(entry.path)
