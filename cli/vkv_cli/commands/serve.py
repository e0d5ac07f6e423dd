"""``vkv serve``: mlx_lm.server over a store."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vkv.errors import VkvError
from vkv.serve.flags import CHOICES, RANGES
from vkv_cli import quiet
from vkv_cli.models import cannot_load
from vkv_cli.options import CodecChoice, codec_options

if TYPE_CHECKING:
    from vkv.serve import Server

LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


def _json(_: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        options = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"not JSON: {exc}", param=param) from None
    if not isinstance(options, dict):
        raise click.BadParameter("expected an object", param=param)
    return options


def _size(_: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from vkv.store.local import units

    try:
        return None if value is None else units.size(value)
    except VkvError as exc:
        raise click.BadParameter(str(exc), param=param) from None


def _list(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    return [item for item in value.split(",") if item]


def _number(name: str, default: Any, text: str) -> Callable[..., Any]:
    """Make a flag for a number, with the range that the server checks."""
    key = name.removeprefix("--").replace("-", "_")
    kind: Any
    if key in CHOICES:
        kind = click.Choice(CHOICES[key])
    else:
        least, most = RANGES[key]
        kind = (
            _Finite(least, most)
            if isinstance(least, float)
            else click.IntRange(int(least), int(most))
        )
    return click.option(name, type=kind, default=default, show_default=default is not None,
                        help=text)  # fmt: skip


class _Finite(click.FloatRange):
    """Refuse NaN, which is in every range to click."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and check one value."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


#: Flags of mlx_lm.server, with its defaults; ``--allowed-origins`` alone has a safer one.
MLX_LM = (
    click.option("--model", required=True, help="A directory, or a repository on the hub."),
    click.option("--adapter-path", help="Trained adapter weights and config."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    _number("--port", 8080, "Port to listen on; 0 for a free one."),
    click.option(
        "--allowed-origins", default="", callback=_list, metavar="ORIGIN,…",
        help="Web pages that may use the server; * for all. By default none.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Let the repository's code run."),
    click.option(
        "--log-level", default="INFO", show_default=True,
        type=click.Choice(LEVELS, case_sensitive=False), help="What is logged to stderr.",
    ),
    click.option("--chat-template", default="", help="Instead of the tokenizer's own."),
    click.option("--use-default-chat-template", is_flag=True, help="If the tokenizer has none."),
    _number("--temp", 0.0, "Temperature, where a request has none."),
    _number("--top-p", 1.0, "Likewise, nucleus sampling."),
    _number("--top-k", 0, "Likewise; 0 for off."),
    _number("--min-p", 0.0, "Likewise; 0 for off."),
    _number("--max-tokens", 512, "Most tokens to generate, where a request does not say."),
    click.option(
        "--chat-template-args", default="{}", callback=_json, metavar="JSON",
        help="""Arguments of the chat template, e.g. '{"enable_thinking": false}'.""",
    ),
    _number("--decode-concurrency", 32, "Requests decoded at a time."),
    _number("--prompt-concurrency", 8, "Prompts computed at a time."),
    _number("--prefill-step-size", 2048, "Prompt tokens to process at a time."),
    _number("--prompt-cache-size", 10, "Prompts kept in memory."),
    click.option(
        "--prompt-cache-bytes", callback=_size, metavar="SIZE", help="Most bytes of them."
    ),
    _number("--kv-bits", None, "Quantize the caches in memory; without batching then."),
    _number("--kv-group-size", 64, "For --kv-bits."),
    _number("--quantized-kv-start", 5000, "For --kv-bits: the token to begin at."),
)  # fmt: skip


def _mlx_lm_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(MLX_LM):
        function = option(function)
    return function


@click.command()
@_mlx_lm_options
@click.option(
    "--also-serve",
    multiple=True,
    metavar="MODEL",
    help="Another model, which requests may name; repeat for more. All stay in memory.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name of this server, for the header Host; localhost and its address always are.",
)
@click.option(
    "--allow-image-urls",
    is_flag=True,
    help="Fetch the images that requests name by URL, from public addresses only.",
)
@click.option(
    "--hide-cached-tokens",
    is_flag=True,
    help="Report cached_tokens as 0. The time of an answer still tells what was stored.",
)
@_number("--max-context", None, "Most tokens of a prompt with its answer.  [default: of the model]")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where prompts are stored.  [default: store in vkv's cache directory]",
)
@click.option(
    "--max-bytes",
    default="20GB",
    callback=_size,
    show_default=True,
    metavar="SIZE",
    help="Most bytes of the store; the least recently used prompts are evicted first.",
)
@codec_options(note="For what is stored.")
@click.option(
    "--min-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Load and store a prompt only where that saves this many tokens.",
)
@click.option("--no-write", is_flag=True, help="Only use what is stored.")
@click.option(
    "--stop-seconds",
    type=_Finite(0.0, 3600.0),
    default=4.0,
    show_default=True,
    help="Most seconds from SIGTERM to the end; prompts not written by then are dropped.",
)
def serve(
    store: Path | None,
    max_bytes: int,
    codecs: CodecChoice,
    min_tokens: int,
    no_write: bool,
    stop_seconds: float,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, as mlx_lm.server does, with prompts that survive a restart.

    The API and the flags are mlx_lm.server's, without draft models and several machines.
    What a prompt has in common with an earlier one, also of another run, is not computed
    again: usage.prompt_tokens_details.cached_tokens says how much.

    Requests name the model as --model does, by the last part of that, or not at all. Others
    are refused, unless --also-serve names them.

    SIGINT and SIGTERM end the server within --stop-seconds; a second one ends it at once.
    Should generation fail for good, it ends likewise, with status 1.
    """
    quiet.silence_libraries(logs=False)
    logging.basicConfig(
        level=flags["log_level"], format="%(asctime)s - %(levelname)s - %(message)s"
    )
    spec = codecs.spec()
    from vkv.serve import Disk, Server, upstream

    for handler in logging.getLogger().handlers:
        handler.addFilter(upstream.without_progress)
    args = upstream.arguments(**flags)
    disk = Disk(
        store, max_bytes=max_bytes, min_tokens=min_tokens, codec=spec, write=not no_write,
        kv_bits=args.kv_bits,
    )  # fmt: skip
    _run(Server(args, disk), args.model, stop_seconds)


def _run(server: Server, model: str, seconds: float) -> None:
    """Serve until a signal comes, then end the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _serve(server, model)
    finally:
        _on_signals(signal.SIG_DFL)
        server.close(seconds)
        for number, handler in before.items():
            signal.signal(number, handler)
    # A thread may still compute. Below Python 3.13 one that was joined may still be taking MLX
    # down, and a process that leaves the usual way meanwhile aborts, one time in five.
    sys.stdout.flush()
    os._exit(1 if server.failed else 0)


def _serve(server: Server, model: str) -> None:
    """Load the models, then serve until a signal comes or generation has failed."""
    _on_signals(signal.SIG_DFL)  # nothing is lost while a model is loaded
    wake, stop = socket.socketpair()
    with wake, stop:
        stop.setblocking(False)
        try:
            server.start(died=lambda: stop.send(b"x"))
        except VkvError:
            raise
        except Exception as exc:  # any of mlx-lm, transformers, the hub and the model's own code
            raise cannot_load(model, exc) from exc
        # The system may give a signal to any thread, which does not wake this one, but Python
        # writes to this descriptor in any case.
        signal.set_wakeup_fd(stop.fileno(), warn_on_full_buffer=False)
        _on_signals(lambda *_: None)
        click.echo(
            f"{server.url} is ready; prompts are stored in {server.disk.store.root}", err=True
        )
        try:
            wake.recv(1)
        finally:
            signal.set_wakeup_fd(-1)


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
