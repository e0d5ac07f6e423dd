"""``vkv serve``: mlx_lm.server over a store."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vkv_cli import quiet
from vkv_cli.models import cannot_load
from vkv_cli.options import CodecChoice, codec_options

if TYPE_CHECKING:
    from vkv.serve import Server

LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


def _json(_: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError as exc:
        raise click.BadParameter(f"not JSON: {exc}", param=param) from None
    if not isinstance(found, dict):
        raise click.BadParameter("expected an object", param=param)
    return found


def _size(_: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from vkv.errors import VkvError
    from vkv.store.local import units

    try:
        return None if value is None else units.size(value)
    except VkvError as exc:
        raise click.BadParameter(str(exc), param=param) from None


def _list(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    return [item for item in value.split(",") if item]


def _number(name: str, default: Any, text: str, kind: Any = int) -> Callable[..., Any]:
    return click.option(name, type=kind, default=default, show_default=default is not None,
                        help=text)  # fmt: skip


#: Flags of mlx_lm.server, with its defaults; ``--allowed-origins`` alone has a safer one.
MLX_LM = (
    click.option("--model", required=True, help="A directory, or a repository on the hub."),
    click.option("--adapter-path", help="Trained adapter weights and config."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    _number("--port", 8080, "Port to listen on; 0 for a free one.", click.IntRange(0, 65535)),
    click.option(
        "--allowed-origins", default="", callback=_list, metavar="ORIGIN,…",
        help="Web pages that may read answers; * for all. By default none.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Let the repository's code run."),
    click.option(
        "--log-level", default="INFO", show_default=True,
        type=click.Choice(LEVELS, case_sensitive=False), help="What is logged to stderr.",
    ),
    click.option("--chat-template", default="", help="Instead of the tokenizer's own."),
    click.option("--use-default-chat-template", is_flag=True, help="If the tokenizer has none."),
    _number("--temp", 0.0, "Temperature, where a request has none.", float),
    _number("--top-p", 1.0, "Likewise, nucleus sampling.", float),
    _number("--top-k", 0, "Likewise; 0 for off."),
    _number("--min-p", 0.0, "Likewise; 0 for off.", float),
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
    "--store", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where prompts are stored.  [default: store in vkv's cache directory]",
)  # fmt: skip
@click.option(
    "--max-bytes", default="20GB", show_default=True, metavar="SIZE",
    help="Most bytes of the store; what was used longest ago goes first.",
)  # fmt: skip
@codec_options(note="For what is stored.")
@click.option(
    "--min-tokens", type=click.IntRange(1), default=128, show_default=True,
    help="Read and write a prompt only where that spares so many tokens.",
)  # fmt: skip
@click.option("--no-write", is_flag=True, help="Only use what is stored.")
def serve(
    store: Path | None,
    max_bytes: str,
    codecs: CodecChoice,
    min_tokens: int,
    no_write: bool,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, as mlx_lm.server does, with prompts that survive a restart.

    The API and the flags are mlx_lm.server's, without draft models and several machines.
    What a prompt has in common with an earlier one, also of another run, is not computed
    again: usage.prompt_tokens_details.cached_tokens says how much.

    Requests name the model as --model does, by the last part of that, or not at all.

    SIGINT and SIGTERM end the server once waiting prompts are written; a second one ends
    it at once. Should generation fail for good, it ends likewise, with status 1.
    """
    quiet.silence_libraries(logs=False)
    logging.basicConfig(
        level=flags["log_level"], format="%(asctime)s - %(levelname)s - %(message)s"
    )
    spec = codecs.spec()
    from vkv.serve import Disk, Server, upstream

    args = upstream.arguments(**flags)
    disk = Disk(
        store, max_bytes=max_bytes, min_tokens=min_tokens, codec=spec, write=not no_write,
        kv_bits=args.kv_bits,
    )  # fmt: skip
    _run(Server(args, disk), args.model)


def _run(server: Server, model: str) -> None:
    """Serve until a signal comes, then end the process."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _on_signals(signal.SIG_DFL)  # nothing is lost while the model is loaded
        try:
            server.start(died=stop.set)
        except Exception as exc:  # any of mlx-lm, transformers, the hub and the model's own code
            raise cannot_load(model, exc) from exc
        _on_signals(lambda *_: stop.set())
        click.echo(
            f"{server.url} is ready; prompts are stored in {server.disk.store.root}", err=True
        )
        stop.wait()
    finally:
        _on_signals(signal.SIG_DFL)
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    # Below Python 3.13 a thread that was joined may still be taking MLX down, and a process
    # that leaves the usual way meanwhile aborts, one time in five.
    sys.stdout.flush()
    os._exit(1 if server.failed else 0)


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
