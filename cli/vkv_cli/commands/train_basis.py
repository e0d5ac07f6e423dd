"""``vkv train-basis``: axes for the caches of one model, learnt from texts."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv_cli import text
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import meta_option, model_options, output_option
from vkv_cli.progress import progress
from vkv_cli.streams import read_text


@click.command()
@model_options(required=True)
@click.option(
    "--text",
    "sources",
    multiple=True,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A text of the kind that will be saved; repeatable.",
)
@output_option("-o", "--output")
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Places of each text to learn from, evenly spaced.",
)
@click.option(
    "--context", type=click.IntRange(68), default=2048, show_default=True, help="Tokens of a place."
)
@click.option(
    "--probe",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Tokens read after each, for the gradients; 0 weighs errors by a rule instead.",
)
@meta_option
@text.json_option
def train_basis(
    choice: ModelChoice,
    sources: tuple[Path, ...],
    output: Path,
    windows: int,
    context: int,
    probe: int,
    meta: dict[str, str],
    as_json: bool,
) -> None:
    """Learn from texts how to compress the caches of one model.

    The file that this writes goes to `vkv save --codec tc:bits=1.7 --basis FILE`:
    caches saved so store no axes of their own, and spend bits where this model
    needs them. They cannot be read without it: `vkv generate` finds it in their
    folder, and `vkv convert --inline` makes files that stand alone.
    """
    words = [read_text(source, str(source)) for source in sources]
    model, tokenizer = load_model(choice)
    texts = [
        place
        for text in words
        for place in _places(tokenizer.encode(text), windows, context + probe)
    ]
    with progress("training", unit="tokens") as step:
        info = vkv.train_basis(
            output, model, texts, tokenizer=tokenizer, context=context, probe=probe,
            metadata=choice.metadata() | meta, progress=step,
        )  # fmt: skip
    if as_json:
        text.echo_json(info.to_dict())
        return
    click.echo(
        f"{text.printable(info.path)}: {len(info.header.tables)} tables, "
        f"{text.exact_size(info.size)}, weighed by {info.metadata['basis.weights']}"
    )


def _places(ids: list[int], count: int, length: int) -> list[list[int]]:
    """Return ``count`` runs of ``length`` tokens, evenly spaced; fewer where they would overlap."""
    count = min(count, max(1, len(ids) // length))
    space = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return [ids[i * space : i * space + length] for i in range(count)]
