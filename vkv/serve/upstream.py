"""All of mlx-lm that ``vkv.serve`` stands on, in one place, and a check that it is there.

====================  ==============================================================
``ModelProvider``     loads models; ``model``, ``tokenizer``, ``draft_model`` and
                      ``model_key`` are those of the moment; ``load_default()``, ``load()``
``ResponseGenerator`` takes a provider and a prompt cache; ``stop_and_join()``;
                      ``requests``, a queue of (queue of answers, …); ``_generate()`` is
                      all that its thread does, ``_tokenize()`` gives the prompt first
``APIHandler``        takes a generator, then what ``http.server`` gives; an error is
                      ``_set_completion_headers(status)``, ``end_headers()`` and a body
``LRUPromptCache``    takes ``max_size`` and ``max_bytes``
====================  ==============================================================

Of a prompt cache the generator calls ``fetch_nearest_cache`` and ``insert_cache``, in
the thread that generates; all else goes to an ``LRUPromptCache``.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.metadata import version
from typing import Any

from vkv.errors import UnsupportedError

#: Releases that the tests run against.
TESTED = "0.31.3 and 0.32"
_SERIES = ("0.31", "0.32")
_NAMES = {
    "mlx_lm.server": (
        "ModelProvider.load",
        "ModelProvider.load_default",
        "ResponseGenerator._generate",
        "ResponseGenerator._tokenize",
        "ResponseGenerator.stop_and_join",
        "APIHandler._set_completion_headers",
        "APIHandler.do_POST",
        "APIHandler.handle_models_request",
    ),
    "mlx_lm.models.cache": (
        "LRUPromptCache.fetch_nearest_cache",
        "LRUPromptCache.insert_cache",
        "can_trim_prompt_cache",
        "make_prompt_cache",
    ),
}

#: What ``mlx_lm.server`` has as flags, with its defaults; two are safer here: no page of
#: another origin may read answers (it could find out, token by token, what is stored),
#: and there are no draft models, whose caches no store holds.
DEFAULTS: dict[str, Any] = {
    "model": None,
    "adapter_path": None,
    "host": "127.0.0.1",
    "port": 8080,
    "allowed_origins": (),
    "draft_model": None,
    "num_draft_tokens": 3,
    "trust_remote_code": False,
    "log_level": "INFO",
    "chat_template": "",
    "use_default_chat_template": False,
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 512,
    "chat_template_args": {},
    "decode_concurrency": 32,
    "prompt_concurrency": 8,
    "prefill_step_size": 2048,
    "prompt_cache_size": 10,
    "prompt_cache_bytes": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 5000,
    "pipeline": False,
}


def arguments(**given: Any) -> argparse.Namespace:
    """What ``mlx_lm.server`` makes of its command line.

    Args:
        given: Flags by their Python names; the others have their defaults.

    Raises:
        UnsupportedError: The installed mlx-lm has no such server, or lacks a flag.
    """
    check()
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"mlx_lm.server has no {sorted(unknown)[0]!r}")
    if given.get("kv_bits") is not None and version("mlx-lm").startswith("0.31."):
        raise UnsupportedError(f"mlx-lm {version('mlx-lm')} has no --kv-bits; 0.32 has")
    return argparse.Namespace(**(DEFAULTS | given))


def check() -> None:
    """Refuse releases of mlx-lm that are not known to work.

    Raises:
        UnsupportedError: The version, or what is missing in it.
    """
    found = version("mlx-lm")
    if ".".join(found.split(".")[:2]) not in _SERIES:
        raise UnsupportedError(f"mlx-lm {found}; `vkv serve` works with {TESTED}")
    for module, names in _NAMES.items():
        for name in names:
            if not _has(module, name):
                raise UnsupportedError(
                    f"mlx-lm {found} has no {module}.{name}; `vkv serve` works with {TESTED}"
                )
    import mlx.core as mx

    if mx.distributed.init().size() > 1:
        raise UnsupportedError("`vkv serve` runs on one machine; mlx_lm.server runs on several")


def _has(module: str, name: str) -> bool:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def wire_memory() -> None:
    """Let Metal keep as much memory resident as it recommends, as mlx_lm.server does."""
    import mlx.core as mx

    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
