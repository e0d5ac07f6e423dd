"""vkv: a compressed, versioned, verifiable file format for the KV caches of language models.

::

    info   = vkv.save("sys.vkv", cache, tokens=ids, model=model, tokenizer=tok, codec="raw")
    prompt = vkv.load("sys.vkv", model=model, tokenizer=tok)
    rest   = prompt.resume(ids + more)      # what is still to be computed

Names are resolved when first used, so that ``vkv.inspect`` needs neither MLX nor mlx-lm.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vkv._version import __version__

if TYPE_CHECKING:
    from vkv.compat import load_prompt_cache, save_prompt_cache
    from vkv.convert import convert
    from vkv.diff import diff
    from vkv.errors import VkvError
    from vkv.info import Info, inspect
    from vkv.live.basis import train_basis
    from vkv.live.load import load
    from vkv.live.make import make_prompt_cache
    from vkv.live.prompt import Prompt
    from vkv.live.save import save
    from vkv.store import PromptStore
    from vkv.validate import Report, validate

_HOME = {
    "Info": "vkv.info",
    "Prompt": "vkv.live.prompt",
    "PromptStore": "vkv.store",
    "Report": "vkv.validate",
    "VkvError": "vkv.errors",
    "convert": "vkv.convert",
    "diff": "vkv.diff",
    "inspect": "vkv.info",
    "load": "vkv.live.load",
    "load_prompt_cache": "vkv.compat",
    "make_prompt_cache": "vkv.live.make",
    "save": "vkv.live.save",
    "save_prompt_cache": "vkv.compat",
    "train_basis": "vkv.live.basis",
    "validate": "vkv.validate",
}

__all__ = [
    "Info",
    "Prompt",
    "PromptStore",
    "Report",
    "VkvError",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "save",
    "save_prompt_cache",
    "train_basis",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vkv' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _FrontDoor(ModuleType):
    """Importing ``vkv.diff``, the module, does not hide ``vkv.diff``, the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
