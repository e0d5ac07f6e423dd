"""Print columns, bars and colours with rich, at the width of the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import click

from vkv_cli.text import WIDE, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

#: Columns of a pipe: what is read by a program is not cut.
PIPE = 4000
#: Widest bar, and columns between two cells, and the fewest of a cell that is cut.
BAR, GAP, LEAST = 24, 2, 8
STYLES = {"id": "cyan", "head": "bold", "dim": "dim", "bad": "red", "bar": "green"}


def console() -> Console:
    """Return a console for standard output.

    It has the width of ``COLUMNS``, or of the terminal. Colours are for a terminal alone, and
    for none if ``NO_COLOR`` is set.
    """
    from rich.console import Console
    from rich.theme import Theme

    made = Console(highlight=False, markup=False, emoji=False, theme=Theme(STYLES))
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        made.width = PIPE
    if made.no_color:
        made._color_system = None
    return made


def width() -> int:
    """Return the columns that a line may take; at most 120."""
    return min(console().width, 120)


def show(*parts: RenderableType) -> None:
    """Print parts below each other, without spaces at the ends of lines; words are wrapped."""
    out = console()
    with out.capture() as capture:
        for part in parts:
            out.print(part, crop=False)
    lines = capture.get().splitlines()
    click.echo("\n".join(line.rstrip() for line in lines), color=out.is_terminal)


def whole(line: str) -> Text:
    """Return a line that is neither cut nor wrapped, such as a path."""
    from rich.text import Text

    return Text(printable(line), no_wrap=True, overflow="ignore", end="\n")


def columns(
    rows: Iterable[Sequence[str]],
    *,
    header: bool = False,
    right: Iterable[int] = (),
    cut: Iterable[int] = (),
    wrap: bool = False,
    styles: Sequence[str] = (),
) -> Table:
    """Return a table; where it is too wide, cells are cut, which an ellipsis shows.

    Args:
        rows: Cells, printed as ``printable`` makes them; the last one of a row may be long.
        header: The first row is one.
        right: Columns flush right.
        cut: Columns that may be cut, the widest first; -1 - i cuts column i at its start.
        wrap: Break long cells into lines, and cut none.
        styles: Of the columns, names in ``STYLES``; none where there are fewer.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[*(printable(c, WIDE) for c in row[:-1]), printable(row[-1])] for row in rows]
    if not wrap:
        cells = _fitted(cells, list(cut))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    for i in range(len(cells[0]) if cells else 0):
        justify: Literal["left", "right"] = "right" if i in set(right) else "left"
        style = styles[i] if i < len(styles) else ""
        table.add_column(justify=justify, style=style, overflow="fold", no_wrap=not wrap)
    for n, row in enumerate(cells):
        table.add_row(*(Text(c, style="head" if header and n == 0 else "") for c in row))
    return table


def _fitted(cells: list[list[str]], cut: list[int]) -> list[list[str]]:
    """Return cells cut so that a row fits into the width."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    starts = {-1 - i for i in cut if i < 0}
    can = [i if i >= 0 else -1 - i for i in cut]
    over = sum(widths) + GAP * (len(widths) - 1) - console().width
    while over > 0 and can and widths[most := max(can, key=lambda i: widths[i])] > LEAST:
        widths[most] -= 1
        over -= 1
    return [[_cut(c, widths[i], i in starts) for i, c in enumerate(row)] for row in cells]


def _cut(text: str, columns: int, start: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= columns:
        return text
    if start:
        return "…" + set_cell_size(text[::-1], columns - 1)[::-1].strip()
    return set_cell_size(text, columns - 1).rstrip() + "…"


def bar(share: float, columns: int) -> str:
    """Return a bar of ``share`` (0 to 1) of ``columns``, in eighths of a column."""
    utf = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    if not utf:
        return "#" * round(share * columns)
    eighths = round(share * columns * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8]).strip()
