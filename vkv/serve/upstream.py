"""Name everything of mlx_lm.server that ``vkv.serve`` depends on, and check that it is there.

=====================  =============================================================
``ModelProvider``      loads a model in ``load_default``; ``model``, ``tokenizer``,
                       ``processor`` (0.32), ``draft_model`` and ``model_key`` are those
                       of the moment; ``load`` is called for each batch
``ResponseGenerator``  takes a provider and a prompt cache; ``requests`` is a queue of
                       (queue of answers, request, arguments); ``_generate`` is all that
                       its thread ``_generation_thread`` does, until ``_stop``;
                       ``_tokenize`` gives the prompt, its segments and their types
                       first; ``_serve_single`` computes
                       one request alone; ``generate`` queues a request
``CompletionRequest``  holds a prompt or messages
``GenerationContext``  begins an answer; ``stop`` ends it at its next token
``APIHandler``         takes a generator, then what ``http.server`` gives;
                       ``handle_completion`` answers a request from attributes that
                       ``completion.settings`` makes; an error is
                       ``_set_completion_headers(status)``, ``end_headers()`` and a body
``LRUPromptCache``     takes ``max_size`` and ``max_bytes``
``BatchGenerator``     reads a prompt in the segments that ``insert_segments`` gets; the
                       cache at the end of each, but the last, is taken by
                       ``extract_cache`` and goes to ``insert_cache`` with its type
=====================  =============================================================

Of a prompt cache the generator calls ``fetch_nearest_cache`` and ``insert_cache``;
all else goes to an ``LRUPromptCache``.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

from vkv.errors import UnsupportedError
from vkv.serve.flags import DEFAULTS, OWN, check_value

#: Releases that the tests run against.
TESTED = "0.31.3 and 0.32"
_SERIES = ("0.31", "0.32")
_SERVER = os.path.join("mlx_lm", "server.py")
_NAMES = {
    "mlx_lm.server": (
        "APIHandler._set_completion_headers",
        "APIHandler.completion_usage_response",
        "APIHandler.do_OPTIONS",
        "APIHandler.generate_response",
        "APIHandler.handle_completion",
        "CompletionRequest",
        "GenerationContext.stop",
        "ModelProvider.load",
        "ModelProvider.load_default",
        "ResponseGenerator._generate",
        "ResponseGenerator._serve_single",
        "ResponseGenerator._tokenize",
        "ResponseGenerator.generate",
    ),
    "mlx_lm.generate": ("BatchGenerator.extract_cache", "BatchGenerator.insert_segments"),
    "mlx_lm.models.cache": (
        "LRUPromptCache.fetch_nearest_cache",
        "LRUPromptCache.insert_cache",
        "can_trim_prompt_cache",
        "make_prompt_cache",
    ),
}
#: Attributes that constructors of ``mlx_lm.server`` set.
_ATTRIBUTES = {
    "ModelProvider": ("draft_model", "is_batchable", "model", "model_key", "tokenizer"),
    "ResponseGenerator": ("_generation_thread", "_stop", "model_provider", "requests"),
}


def arguments(**given: Any) -> argparse.Namespace:
    """Make what ``mlx_lm.server`` makes of its command line, and the flags of ``OWN``.

    Args:
        given: Flags by their Python names; the others have their defaults.

    Raises:
        UnsupportedError: If the installed mlx-lm has no such server, or lacks a flag.
        VkvError: If a value is out of its range.
    """
    check()
    known = DEFAULTS | OWN
    if unknown := given.keys() - known.keys():
        raise TypeError(f"mlx_lm.server has no {sorted(unknown)[0]!r}")
    if given.get("kv_bits") is not None and version("mlx-lm").startswith("0.31."):
        raise UnsupportedError(f"mlx-lm {version('mlx-lm')} has no --kv-bits; 0.32 has")
    for name, value in given.items():
        check_value(name, value)
    return argparse.Namespace(**(known | given))


def each_model(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the flags for each served model, the first one's first."""
    yield args
    for model in args.also_serve:
        yield argparse.Namespace(**vars(args) | {"model": model, "adapter_path": None})


def check() -> None:
    """Refuse releases of mlx-lm that are not known to work.

    Raises:
        UnsupportedError: With the version, or the name that is missing in it.
    """
    installed = version("mlx-lm")
    if ".".join(installed.split(".")[:2]) not in _SERIES:
        raise UnsupportedError(f"mlx-lm {installed}; `vkv serve` works with {TESTED}")
    for name in _missing():
        raise UnsupportedError(f"mlx-lm {installed} has no {name}; `vkv serve` works with {TESTED}")
    import mlx.core as mx

    if mx.distributed.init().size() > 1:
        raise UnsupportedError("`vkv serve` runs on one machine; mlx_lm.server runs on several")


def _missing() -> Iterator[str]:
    for module, names in _NAMES.items():
        yield from (f"{module}.{name}" for name in names if _get(module, name) is None)
    for name, attributes in _ATTRIBUTES.items():
        set_there = _get("mlx_lm.server", name).__init__.__code__.co_names
        yield from (f"mlx_lm.server.{name}().{x}" for x in attributes if x not in set_there)


def _get(module: str, name: str) -> Any:
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def without_progress(record: logging.LogRecord) -> bool:
    """Return False for what mlx_lm.server says of a request: a filter for log handlers.

    It says the progress of each prompt, and what its cache holds; the handler of a request
    says all in one line.
    """
    return record.levelno != logging.INFO or not record.pathname.endswith(_SERVER)


def wire_memory() -> None:
    """Let Metal keep as much memory resident as it recommends, as mlx_lm.server does."""
    import mlx.core as mx

    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
