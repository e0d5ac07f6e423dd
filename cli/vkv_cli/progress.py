"""Progress on stderr, if it is a terminal; silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from vkv_cli.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Live
    from rich.progress import TaskID

#: Called with (done, in all).
Progress = Callable[[int, int], None]


class Bar:
    """A bar on stderr, or nothing where that is no terminal. Call it with (done, in all)."""

    def __init__(self, live: Live | None = None, task: TaskID | None = None):
        self._live, self._task = live, task

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total)

    def say(self, line: str, *, err: bool = False) -> None:
        """Print a line while the bar is shown: above it, if both are on the terminal."""
        if self._live is None or not (err or sys.stdout.isatty()):
            click.echo(line, err=err)
        else:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(label: str, *, unit: str = "") -> Iterator[Bar]:
    """Show a bar that vanishes when the block ends.

    Args:
        label: What is going on.
        unit: ``"tokens"``, ``"bytes"``, or nothing for work without an end in sight.

    Yields:
        The bar, to be called with (done, in all).
    """
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich import progress as rich_progress
    from rich.console import Console
    from rich.markup import escape

    columns: list[str | rich_progress.ProgressColumn] = [
        rich_progress.SpinnerColumn(),
        "{task.description}",
    ]
    if unit == "bytes":
        columns += [rich_progress.BarColumn(), rich_progress.DownloadColumn()]
    elif unit:
        columns += [rich_progress.BarColumn(), f"{{task.completed}}/{{task.total}} {unit}"]
    columns.append(rich_progress.TimeElapsedColumn())
    if unit:
        columns += ["left", rich_progress.TimeRemainingColumn()]
    with rich_progress.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # else what is printed meanwhile goes to stderr, also from a pipe
        redirect_stderr=False,
    ) as live:
        yield Bar(live, live.add_task(escape(printable(label)), total=None))
