"""``vkv codecs``: every codec with its options, their defaults and ranges."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vkv.format.schema import Scalar
from vkv_cli import text

if TYPE_CHECKING:
    from vkv.codecs.options import Option

#: Columns before the texts.
_WIDTH = 28


@click.command()
@text.json_option
def codecs(as_json: bool) -> None:
    """List the codecs: their options, defaults and ranges.

    A codec string is NAME[:OPTION=VALUE,…], e.g. affine:bits=8,group=32.
    """
    from vkv.codecs.options import options, summary
    from vkv.codecs.registry import CODECS, newest

    found = {name: CODECS[name, version] for name, version in newest().items()}
    for name, codec in found.items() if as_json else ():
        own = {"schema_version": 1, "codec": name, "version": codec.version}
        about = {"summary": summary(codec), "options": [asdict(x) for x in options(codec)]}
        text.echo_json(own | about)
    blocks = [
        [f"{name}: {_plain(summary(codec))}", *(line for x in options(codec) for line in _lines(x))]
        for name, codec in found.items()
    ]
    if not as_json:
        click.echo("\n\n".join("\n".join(block) for block in blocks))


def _lines(option: Option) -> Iterator[str]:
    """Return the lines of an option: name, default, and its help beside them."""
    about = option.text
    if option.type != "bool":
        about += f" {option.range[0].upper()}{option.range[1:]}."
    if option.keys != option.values:
        about += f" Default for values: {_text(option.values)}."
    first, *more = textwrap.wrap(about, 100 - _WIDTH)
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
