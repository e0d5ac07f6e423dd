"""``vkv bench``: rate, quality and speed of codecs on a model."""

from __future__ import annotations

from pathlib import Path

import click

import vkv
from vkv.errors import VkvError
from vkv_cli import text
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import basis_option, model_options
from vkv_cli.progress import progress
from vkv_cli.streams import read_text


@click.command()
@model_options(required=True)
@click.option(
    "--text",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="A text file; its first tokens are the context, the next ones the test. In a checkout, "
    "a novel by default.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens in the cache.",
)
@click.option(
    "--test",
    type=click.IntRange(min=2),
    default=256,
    show_default=True,
    help="Tokens read after it.",
)
@click.option("--codecs", help="Codec strings, separated by spaces; KEYS/VALUES for one each.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs behind each median.",
)
@basis_option("a row more of each setting of tc")
@click.option("--peers", is_flag=True, help="Also mlx-lm's own files, and veloxquant-mlx.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.json, kl.png and load.png.",
)
@text.json_option
def bench(
    choice: ModelChoice,
    source: str | None,
    context: int,
    test: int,
    codecs: str | None,
    repeat: int,
    basis: Path | None,
    peers: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure codecs on one prompt cache of a model.

    The context is prefilled once. Every codec encodes, writes and loads that cache,
    and the model reads the test tokens after it; the raw cache is the zero. A row that
    fails costs no other row, and exit status 1.
    """
    from vkv.bench import Bench, default_codecs, with_basis
    from vkv.bench.report import aligned

    names = codecs.split() if codecs else default_codecs()
    names = with_basis(names) if basis else names
    chosen = Path(source) if source else _bundled()
    words = read_text(chosen, str(chosen))
    model, tokenizer = load_model(choice)
    ids = tokenizer.encode(words)
    with progress("prefill", unit="tokens") as report:
        run = Bench(
            model,
            ids,
            context=context,
            test=test,
            repeat=repeat,
            basis=basis,
            name=Path(choice.model or "").name,
            progress=report,
        )
    with progress("codecs", unit="rows") as report:
        for i, _ in enumerate(run.run(names)):
            report(i + 1, len(names))
        if peers:
            with run.results.attempt("peers"):
                _peers(run)
    results = run.results
    if as_json:
        text.echo_json(results.to_dict())
    else:
        click.echo(aligned(results.table()))
        for row in results.rows:
            for note in row.notes:
                click.echo(f"{row.name}: {note}")
        for failure in results.failures:
            click.echo(f"{failure.name}: not measured: {text.printable(failure.reason)}")
        click.echo(f"first token from scratch: {results.first_token_cold:.2f} s")
    if output is not None:
        _write(output, results)
    return int(bool(results.failures))


def _bundled() -> Path:
    """Return the text of a checkout; wheels do not carry it."""
    path = Path(vkv.__file__).parents[1] / "fixtures" / "text" / "prose.txt"
    if not path.exists():
        raise click.UsageError("no text beside the installed package: give --text.")
    return path


def _peers(run: object) -> None:
    from vkv.bench import Bench
    from vkv.bench.peers import rows

    assert isinstance(run, Bench)
    for row in rows(run):
        run.results.rows.append(row)


def _write(folder: Path, results: object) -> None:
    from vkv.bench import Results
    from vkv.bench.plot import draw

    assert isinstance(results, Results)
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder / "results.json")
    try:
        draw(results, folder)
    except VkvError as exc:
        click.echo(f"vkv: warning: {text.printable(str(exc))}", err=True)
