"""``vkv store add``: copies of files."""

from __future__ import annotations

import click

import vkv
from vkv.errors import VkvError
from vkv.sources.urls import is_url, shown
from vkv_cli import text
from vkv_cli.commands.store.common import parents_option, same_as, store_option
from vkv_cli.files import each_file, files_argument
from vkv_cli.options import search_path_option


@click.command()
@files_argument
@store_option
@parents_option
@search_path_option
@text.json_option
def add(
    files: tuple[str, ...], store: vkv.PromptStore, search_paths: list[str] | None, as_json: bool
) -> int:
    """Take copies of .vkv files in, after checking every byte.

    A file must name its model and hold its tokens. Its dependencies come with it. Where
    the store has the same content already (whole, or depending on other files), the entry is
    that one, with its id.
    """

    def take(path: str) -> bool:
        if is_url(path):
            raise VkvError(f"{shown(path)}: only files are added; `vkv store pull` takes URLs")
        entry = store.add(path, search_paths=search_paths)
        if as_json:
            text.echo_json({"schema_version": 1, **entry.to_dict()})
        else:
            same = same_as(vkv.inspect(path).id, entry)
            click.echo(f"{text.printable(path)}: {entry.id}, {entry.tokens:,} tokens{same}")
        return True

    return each_file(files, take)
