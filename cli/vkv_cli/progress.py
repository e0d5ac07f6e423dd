"""Progress on stderr, if it is a terminal; silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vkv_cli.text import printable

#: Called with (done, in all).
Progress = Callable[[int, int], None]


@contextmanager
def progress(label: str, *, unit: str = "") -> Iterator[Progress]:
    """Show a bar that vanishes when the block ends.

    Args:
        label: What is going on.
        unit: ``"tokens"``, ``"bytes"``, or nothing for work without an end in sight.

    Yields:
        A function to be called with (done, in all).
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
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
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(printable(label)), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
