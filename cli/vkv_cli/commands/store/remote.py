"""``vkv store push``, ``pull`` and ``ls-remote``: entries on other machines."""

from __future__ import annotations

import os
from pathlib import Path

import click

import vkv
from vkv.sources.urls import shown
from vkv.store import Remote, tiered
from vkv_cli import screen, text
from vkv_cli.commands.store.common import parents_option, same_as, show, store_option
from vkv_cli.options import local, search_path_option
from vkv_cli.progress import progress
from vkv_cli.written import show_written

remote_option = click.option(
    "--remote", metavar="URL", required=True, envvar="VKV_REMOTE", show_envvar=True,
    help="The other store: a directory on s3://, gs://, file:// and what else fsspec writes; "
    "https:// to pull from.",
)  # fmt: skip


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="ID|FILE...")
@remote_option
@store_option
@search_path_option
@text.json_option
def push(
    what: tuple[str, ...],
    remote: str,
    store: vkv.PromptStore,
    search_paths: list[str] | None,
    as_json: bool,
) -> None:
    """Send entries of this store, or .vkv files, to a remote, with their dependencies.

    What is there already is not sent again. Every byte is checked before it is sent;
    an object appears under its name whole or not at all.
    """
    there, counts, sizes = Remote(remote), [0, 0], 0
    for name in what:
        is_file = os.path.exists(name)
        about = vkv.inspect(name) if is_file else store.entries(name)[0]
        sent = not there.holds(about.id, about.size)
        with progress(f"pushing {name}", unit="bytes") as step:
            if is_file:
                key = there.push(name, search_paths=search_paths, progress=step)
            else:
                key = tiered.push(store, there, name, step)
        if as_json:
            text.echo_json({"schema_version": 1, "id": key, "remote": shown(remote), "sent": sent})
        else:
            note = text.exact_size(about.size) if sent else "there already"
            click.echo(f"{key[:12]}  {text.printable(name)}: {note}")
        counts[sent] += 1
        sizes += about.size * sent
    if not as_json:
        where = text.printable(shown(remote))
        already = f", {counts[0]} there already" * bool(counts[0])
        click.echo(f"sent {counts[1]} to {where}, {text.size(sizes)}{already}")


@click.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@remote_option
@store_option
@parents_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    callback=local,
    help="Write a file, or files named by their ids, and leave the store alone.",
)
@text.json_option
def pull(
    ids: tuple[str, ...], remote: str, store: vkv.PromptStore, output: Path | None, as_json: bool
) -> None:
    """Take entries of a remote into this store, with their dependencies.

    Each is checked by its id and the digest of every tensor before it is taken in. A
    transfer that was interrupted goes on where it ended.
    """
    if output is not None and len(ids) > 1 and not output.is_dir():
        raise click.UsageError("several files need a directory: --output is none.")
    there = Remote(remote)
    for key in ids:
        with progress(f"pulling {key}", unit="bytes") as step:
            if output is None:
                entry, fetched = tiered.pull(store, there, key, step)
            else:
                path = there.pull(key, output, progress=step)
        if output is not None:
            show_written(vkv.inspect(path), as_json)
        elif as_json:
            show([entry], as_json)
        else:
            same = same_as(there.full_id(key), entry)
            size = text.exact_size(entry.size)
            click.echo(f"{entry.id}: {entry.tokens:,} tokens, {size}{same}")
            for dependency in fetched:
                click.echo(f"  with {dependency}, which it depends on")


@click.command()
@remote_option
@text.json_option
def ls_remote(remote: str, as_json: bool) -> None:
    """List the files of a remote, the largest first: id and size."""
    found = sorted(Remote(remote).ls(), key=lambda item: (-item[1], item[0]))
    if as_json:
        for key, size in found:
            text.echo_json({"schema_version": 1, "id": key, "size": size})
        return
    if found:
        rows = [("ID", "SIZE"), *((key, text.size(size)) for key, size in found)]
        screen.show(screen.columns(rows, header=True, right=(1,), cut=(0,), styles=("id",)))
    files = f"{len(found):,} file{'s' * (len(found) != 1)}"
    sizes = text.size(sum(size for _, size in found))
    click.echo(f"{files}, {sizes} at {text.printable(shown(remote))}")
