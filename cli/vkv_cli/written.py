"""Print what ``save``, ``convert`` and ``generate --save`` say of the file they wrote."""

from __future__ import annotations

import click

from vkv.format.info import Info
from vkv_cli import text


def show_written(info: Info, as_json: bool = False, *, err: bool = False) -> None:
    """Print one line about the file, and one for each thing that was asked for and not done."""
    if as_json:
        text.echo_json(info.to_dict())
        return
    count = "unknown tokens" if info.tokens is None else f"{info.tokens:,} tokens"
    account = info.accounting
    click.echo(
        f"{text.printable(info.path)}: {count}, {text.exact_size(info.size)}, "
        f"{account.bits:.2f} bits per element, ratio to fp16 {account.ratio:.2f}"
        + f"; beside {account.external:,} bytes in other files"
        * bool(account.external),
        err=err,
    )
    if info.checkpoints:
        counts = ", ".join(f"{c['tokens']:,}" for c in info.checkpoints)
        size = text.size(sum(c["bytes"] for c in info.checkpoints))
        click.echo(
            f"note: this cache cannot be cut: checkpoints after {counts} tokens take {size}, on "
            "top of the rate of the codec",
            err=err,
        )
    for note in info.notes:
        click.echo(f"note: layers {text.printable(note)}", err=err)
