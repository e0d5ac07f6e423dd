"""``vkv codecs``: which codec to choose, and the options of each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vkv.format.schema import Scalar
from vkv_cli import screen, text

if TYPE_CHECKING:
    from vkv.codecs.options import Option

#: Columns before the texts.
_WIDTH = 28


#: Codec -> bits per element, how fast it is, when to use it; measured in docs/codecs.md and
#: docs/benchmarks.md.
GUIDE = {
    "raw": ("16", "fast", "disk is cheap, and no bit may change"),
    "lossless": ("10.3", "a core's time", "no bit may change, and bytes cost: sent, object stores"),
    "affine": ("8.5 … 2.5", "fast", "loading must be fast and simple; also in memory"),
    "nsnquant": ("2.24, 1.24", "fast", "the smallest cache in memory; no calibration"),
    "kvquant": (
        "about 3.6",
        "slow steps",
        "keys have strong outliers; in memory decoded at each step",
    ),
    "tc": ("any rate", "slow", "written once, read often: half of 4 bits, and nearer to raw"),
}


@click.command()
@click.argument("names", nargs=-1, metavar="[CODEC]...")
@text.json_option
def codecs(names: tuple[str, ...], as_json: bool) -> None:
    """Help to choose a codec; with a name, show its options, defaults and ranges.

    A codec string is NAME[:OPTION=VALUE,…], e.g. affine:bits=8,group=32.
    """
    from vkv.codecs.options import options, summary
    from vkv.codecs.registry import CODECS, newest

    known = {name: CODECS[name, version] for name, version in newest().items()}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}.")
    found = {name: known[name] for name in names or known}
    if as_json:
        for name, codec in found.items():
            own = {"schema_version": 1, "codec": name, "version": codec.version}
            about = {"summary": summary(codec), "options": [asdict(x) for x in options(codec)]}
            text.echo_json(own | about)
    elif not names:
        rows = [("CODEC", "BITS", "SPEED", "WHEN TO USE IT"), *((n, *GUIDE[n]) for n in GUIDE)]
        table = screen.columns(rows, header=True, wrap=True, styles=("id",))
        screen.show(table, "`vkv codecs NAME` shows the options of one.")
    else:
        blocks = [
            [f"{n}: {_plain(summary(c))}", _when(n), *(x for o in options(c) for x in _lines(o))]
            for n, c in found.items()
        ]
        click.echo("\n\n".join("\n".join(block) for block in blocks))


def _when(name: str) -> str:
    bits, speed, when = GUIDE[name]
    line = f"{bits} bits per element; {speed}; for: {when}."
    return textwrap.fill(line, _width(), initial_indent="  ", subsequent_indent="  ")


def _width() -> int:
    return min(screen.width(), 100)


def _lines(option: Option) -> Iterator[str]:
    """Return the lines of an option: name, default, and its help beside them."""
    about = option.text
    if option.type != "bool":
        about += f" {option.range[0].upper()}{option.range[1:]}."
    if option.keys != option.values:
        about += f" Default for values: {_text(option.values)}."
    first, *more = textwrap.wrap(about, _width() - _WIDTH)
    yield f"{f'  {option.name}={_text(option.keys)}':<{_WIDTH}}{first}"
    yield from (f"{'':<{_WIDTH}}{line}" for line in more)


def _plain(text: str) -> str:
    """Return ``text`` without the marks of code."""
    return re.sub('``"?|"?``', "", text)


def _text(value: Scalar) -> str:
    """Return a value as a codec string writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
