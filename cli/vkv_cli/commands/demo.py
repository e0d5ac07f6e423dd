"""``vkv demo``: the main job on a real model, from prompt to file to answer, with its checks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import vkv
from vkv import identity
from vkv.caches import chat
from vkv.caches.prompt import Prompt
from vkv.demo import model as demo_model
from vkv.errors import VkvError
from vkv.format.info import Info
from vkv_cli import screen, text
from vkv_cli.commands import inspect_screen
from vkv_cli.compute import Sampling, answer, prefill
from vkv_cli.demo_text import QUESTION, SYSTEM_PROMPT
from vkv_cli.models import ModelChoice, load_model
from vkv_cli.written import show_written

if TYPE_CHECKING:
    from rich.console import RenderableType

#: File name -> codec. The first is the lossless one.
FILES = {"raw.vkv": "raw", "affine4.vkv": "affine:bits=4"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to the answer.

    Attributes:
        info: The file it started from, if any.
        reused: Prompt tokens that were not computed.
        computed: Those that were.
        seconds: To the first token, reading the file included, loading the model not.
        tokens: Of the answer.
        text: The answer.
    """

    info: Info | None
    reused: int
    computed: int
    seconds: float
    tokens: list[int]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "file": self.info and self.info.to_dict(),
            "prompt_tokens": {"reused": self.reused, "computed": self.computed},
            "seconds_to_first_token": self.seconds,
            "tokens": self.tokens,
            "text": self.text,
        }


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Put the files here and keep them. By default they are removed at the end.",
)
@click.option(
    "-m",
    "--max-tokens",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="Tokens of each answer.",
)
@text.json_option
def demo(directory: Path | None, max_tokens: int, as_json: bool) -> int:
    """Save, inspect and resume a prompt of a real model.

    The cache of a long system prompt is saved, losslessly and in 4 bits; both files
    are checked; then new processes answer a question from them. The model is
    SmolLM2-135M-Instruct (98 MB, fetched once). It takes some minutes on two cores.

    Exit status 1 if a check fails.
    """
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        path = demo_model.smollm2(report=lambda line: click.echo(f"{line} …", err=True))
        choice = ModelChoice(str(path), None, trust_remote_code=False, eos_token=None)
        with _workplace(directory) as place:
            infos, scratch, sound = _in_this_process(choice, place, max_tokens)
            click.echo("\nIn new processes:")
            resumed = [_in_a_new_process(info, max_tokens) for info in infos]
        checks = _checks(scratch, resumed, sound)
        click.echo()
        screen.show(*_conclusion(scratch, resumed, checks))
    if as_json:
        attempts = [attempt.to_dict() for attempt in (scratch, *resumed)]
        text.echo_json({"schema_version": 1, "attempts": attempts, "checks": checks})
    return 0 if all(checks.values()) else 1


@contextmanager
def _workplace(directory: Path | None) -> Iterator[Path]:
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="vkv-demo-") as temporary:
            yield Path(temporary)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory


def _in_this_process(
    choice: ModelChoice, place: Path, max_tokens: int
) -> tuple[list[Info], Attempt, bool]:
    """Compute the prompt, save it, check the files, and answer from the live cache."""
    model, tokenizer = load_model(choice)
    owner = {"model": model, "tokenizer": tokenizer}
    tokens = chat.opening(tokenizer, [{"role": "system", "content": SYSTEM_PROMPT}])
    name = demo_model.SMOLLM2.name
    click.echo(f"Computing a system prompt of {len(tokens)} tokens with {name} …")
    start = time.perf_counter()
    cache = prefill(model, tokens, prefill_step_size=64)
    spent = time.perf_counter() - start
    infos = []
    for file, codec in FILES.items():
        options = owner | {"metadata": choice.metadata()}
        infos.append(vkv.save(place / file, cache, tokens=tokens, codec=codec, **options))
        show_written(infos[-1])
    click.echo()
    inspect_screen.show(infos[-1])
    sound = all(vkv.validate(info.path, deep=True, **owner).ok for info in infos)
    live = Prompt(cache, tokens, infos[0])
    rest = live.turn(tokenizer, QUESTION)
    found = answer(cache, rest, model, tokenizer, _sampling(max_tokens), 0, echo=False)
    attempt = Attempt(
        None, 0, len(tokens) + len(rest), spent + found.seconds, found.tokens, found.text
    )
    return infos, attempt, sound


def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens, temp=0.0, top_p=1.0, seed=None)


def _in_a_new_process(info: Info, max_tokens: int) -> Attempt:
    command = ["generate", info.path, "--model", info.metadata["model"], "--prompt", QUESTION]
    command += ["--max-tokens", str(max_tokens)]
    click.echo(f"$ vkv {shlex.join(command)}")
    done = subprocess.run(
        [sys.executable, "-m", "vkv_cli", *command, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise VkvError(f"the new process ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    click.echo(found["text"].strip())
    seconds = found["seconds_to_read"] + found["seconds_to_first_token"]
    prompt = found["prompt_tokens"]
    return Attempt(
        info, prompt["reused"], prompt["computed"], seconds, found["tokens"], found["text"]
    )


def _same_tokens(a: Attempt, b: Attempt) -> int:
    return identity.common_prefix(a.tokens, b.tokens)


def _checks(scratch: Attempt, resumed: list[Attempt], sound: bool) -> dict[str, bool]:
    """Return what must hold, and if it does."""
    infos = [a.info for a in resumed if a.info is not None]
    lossless = resumed[0].tokens
    return {
        "the parts of every file add up to its size, to the byte": all(
            info.accounting.adds_up for info in infos
        ),
        "every file is sound, its values included": sound,
        f"greedy: all {len(scratch.tokens)} tokens from {next(iter(FILES))} are those of the "
        "cache that was never saved": lossless == scratch.tokens,
    }


def _conclusion(
    scratch: Attempt, resumed: list[Attempt], checks: dict[str, bool]
) -> list[RenderableType]:
    """Return a table that compares the attempts, and the checks."""
    attempts = [scratch, *resumed]
    infos = [a.info for a in attempts]
    rows = [
        ("", "from scratch", *FILES),
        ("size", *(text.size(i.size) if i else "" for i in infos)),
        ("bits per element", *(f"{i.accounting.bits:.2f}" if i else "" for i in infos)),
        ("prompt tokens reused", *(str(a.reused) for a in attempts)),
        ("prompt tokens computed", *(str(a.computed) for a in attempts)),
        ("time to first token", *(f"{a.seconds:.2f} s" for a in attempts)),
        ("", "", *(f"{scratch.seconds / a.seconds:.0f} times faster" for a in resumed)),
        (
            "same first tokens",
            *(str(identity.common_prefix(scratch.tokens, a.tokens)) for a in attempts),
        ),
    ]
    verdicts = [f"{'ok' if good else 'FAILED'}: {what}" for what, good in checks.items()]
    note = "(time to first token: reading the file included, loading the model not)"
    return [screen.columns(rows, right=range(1, len(attempts) + 1)), note, "", *verdicts]
