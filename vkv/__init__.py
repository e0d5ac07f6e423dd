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
    from vkv.caches.basis.training import train_basis
    from vkv.caches.loading.load import load
    from vkv.caches.packed.make import make_prompt_cache
    from vkv.caches.prompt import Prompt
    from vkv.caches.saving.save import save
    from vkv.errors import VkvError
    from vkv.format.info import Info, inspect
    from vkv.interop.prompt_cache import load_prompt_cache, save_prompt_cache
    from vkv.store import PromptStore
    from vkv.tools.convert import convert
    from vkv.tools.diff import diff
    from vkv.tools.validate import Report, validate

_HOME = {
    "Info": "vkv.format.info",
    "Prompt": "vkv.caches.prompt",
    "PromptStore": "vkv.store",
    "Report": "vkv.tools.validate",
    "VkvError": "vkv.errors",
    "convert": "vkv.tools.convert",
    "diff": "vkv.tools.diff",
    "inspect": "vkv.format.info",
    "load": "vkv.caches.loading.load",
    "load_prompt_cache": "vkv.interop.prompt_cache",
    "make_prompt_cache": "vkv.caches.packed.make",
    "save": "vkv.caches.saving.save",
    "save_prompt_cache": "vkv.interop.prompt_cache",
    "train_basis": "vkv.caches.basis.training",
    "validate": "vkv.tools.validate",
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
