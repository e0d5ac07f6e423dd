"""``vkv validate``: every finding about files, one a line."""

from __future__ import annotations

from typing import Any

import click

import vkv
from vkv_cli import quiet, text
from vkv_cli.files import each_file, files_argument
from vkv_cli.group import run
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.options import model_options, search_path_option


@click.command()
@files_argument
@click.option("--deep", is_flag=True, help="Also decode every tensor and look at its values.")
@search_path_option
@model_options(note="Given, the files are compared with it.")
@text.json_option
def validate(
    files: tuple[str, ...],
    deep: bool,
    search_paths: list[str] | None,
    choice: ModelChoice,
    as_json: bool,
) -> int:
    """Check files: framing, header, layers, codecs, and the digest of every tensor.

    Prints every finding, one a line. Exit status 1 if one of them is an error;
    warnings leave it 0.
    """
    owner: dict[str, Any] = {}
    if choice.model is not None:
        owner["model"], owner["tokenizer"] = load_model(choice)

    def look(path: str) -> bool:
        report = vkv.validate(path, deep=deep, search_paths=search_paths, **owner)
        if as_json:
            text.echo_json(report.to_dict())
            return report.ok
        name = text.printable(path)
        for finding in report.findings:
            click.echo(f"{name}: {text.printable(str(finding))}")
        errors = [f for f in report.findings if f.severity == "error"]
        hint = next((where for f in errors if (where := quiet.where_explained(f, run()))), "")
        count = f"{len(errors)} error{'s' * (len(errors) > 1)}{hint}"
        click.echo(f"{name}: " + ("ok" if report.ok else count))
        return report.ok

    return each_file(files, look, as_json)
