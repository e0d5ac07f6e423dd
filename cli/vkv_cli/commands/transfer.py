"""``vkv push`` and ``vkv pull``: single files to and from URLs."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv.format.info import Info
from vkv.sources.urls import shown
from vkv_cli import text
from vkv_cli.options import local
from vkv_cli.progress import progress
from vkv_cli.written import show_written


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("url")
@click.option("--force", is_flag=True, help="Replace another file that is there.")
@text.json_option
def push(file: Path, url: str, force: bool, as_json: bool) -> None:
    """Send FILE to URL, and check there that it arrived.

    URL is one that fsspec writes, such as s3://bucket/a.vkv, gs://bucket/a.vkv or
    hf://datasets/me/prompts/a.vkv. One that ends with a slash is a folder, in which FILE
    keeps its name. Credentials are those of the scheme's own library (`hf auth login`,
    the files of AWS, …).

    Every byte is checked before it is sent. A file that is there already is not sent
    again; another one is not replaced without --force.
    """
    with progress(f"pushing {file.name}", unit="bytes") as step:
        info = vkv.push(file, url, force=force, progress=step)
    if as_json:
        text.echo_json(info.to_dict() | {"path": shown(info.path)})
        return
    where = text.printable(shown(info.path))
    click.echo(
        f"{text.printable(str(file))}: at {where}, {text.exact_size(info.size)}, id {info.id}"
    )
    _say_dependencies(info)


@click.command()
@click.argument("url")
@click.argument("file", metavar="FILE|DIR", type=click.Path(path_type=Path), callback=local)
@text.json_option
def pull(url: str, file: Path, as_json: bool) -> None:
    """Fetch the file at URL, check every byte, and write it to FILE.

    In a folder it keeps the name it has in the URL. FILE appears whole or not at all;
    an existing file is replaced in one step. A transfer that was interrupted goes on
    where it ended.
    """
    with progress(f"pulling {shown(url)}", unit="bytes") as step:
        info = vkv.pull(url, file, progress=step)
    show_written(info, as_json)
    if not as_json:
        _say_dependencies(info)


def _say_dependencies(info: Info) -> None:
    for key in info.dependencies:
        click.echo(f"note: it depends on the file {key}, which is not sent along; "
                   "`vkv convert --inline` makes one file of both", err=True)  # fmt: skip
