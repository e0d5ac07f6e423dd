"""vkv: a compressed, versioned, verifiable file format for the KV caches of language models.

::

    info   = vkv.save("sys.vkv", cache, tokens=ids, model=model, tokenizer=tok, codec="raw")
    prompt = vkv.load("sys.vkv", model=model, tokenizer=tok)
    rest   = prompt.resume(ids + more)      # the tokens still to be computed

Names are imported when first used, so that ``vkv.inspect`` needs neither MLX nor mlx-lm.
``docs/public-api.md`` says what is public and how a name is deprecated.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vkv._version import __version__

if TYPE_CHECKING:
    from vkv.caches.basis.training import train_basis
    from vkv.caches.checkpoints.prefill import prefill
    from vkv.caches.loading.load import load
    from vkv.caches.packed.make import make_prompt_cache
    from vkv.caches.prompt import Prompt
    from vkv.caches.saving.request import CodecSpec
    from vkv.caches.saving.save import save
    from vkv.errors import (
        CacheError,
        CodecError,
        ContainerError,
        DigestError,
        HeaderError,
        MismatchError,
        MissingFileError,
        NotVkvError,
        StoreUnavailableError,
        UnknownCodecError,
        UnsupportedError,
        VkvError,
    )
    from vkv.format.account import Accounting
    from vkv.format.info import Info, inspect
    from vkv.interop.prompt_cache import load_prompt_cache, save_prompt_cache
    from vkv.store.remote.remote import Remote
    from vkv.store.remote.single import pull, push
    from vkv.store.results import Collected, Entry, Found, Hit, Stats
    from vkv.store.store import PromptStore
    from vkv.store.tiered import TieredStore
    from vkv.tools.convert import convert
    from vkv.tools.diff import Diff, Difference, diff
    from vkv.tools.validate import Finding, Report, validate

#: Module of each public name.
_HOME = {
    "Accounting": "vkv.format.account",
    "CacheError": "vkv.errors",
    "CodecError": "vkv.errors",
    "CodecSpec": "vkv.caches.saving.request",
    "Collected": "vkv.store.results",
    "ContainerError": "vkv.errors",
    "Diff": "vkv.tools.diff",
    "Difference": "vkv.tools.diff",
    "DigestError": "vkv.errors",
    "Entry": "vkv.store.results",
    "Finding": "vkv.tools.validate",
    "Found": "vkv.store.results",
    "HeaderError": "vkv.errors",
    "Hit": "vkv.store.results",
    "Info": "vkv.format.info",
    "MismatchError": "vkv.errors",
    "MissingFileError": "vkv.errors",
    "NotVkvError": "vkv.errors",
    "Prompt": "vkv.caches.prompt",
    "PromptStore": "vkv.store.store",
    "Remote": "vkv.store.remote.remote",
    "Report": "vkv.tools.validate",
    "Stats": "vkv.store.results",
    "StoreUnavailableError": "vkv.errors",
    "TieredStore": "vkv.store.tiered",
    "UnknownCodecError": "vkv.errors",
    "UnsupportedError": "vkv.errors",
    "VkvError": "vkv.errors",
    "convert": "vkv.tools.convert",
    "diff": "vkv.tools.diff",
    "inspect": "vkv.format.info",
    "load": "vkv.caches.loading.load",
    "load_prompt_cache": "vkv.interop.prompt_cache",
    "make_prompt_cache": "vkv.caches.packed.make",
    "prefill": "vkv.caches.checkpoints.prefill",
    "pull": "vkv.store.remote.single",
    "push": "vkv.store.remote.single",
    "save": "vkv.caches.saving.save",
    "save_prompt_cache": "vkv.interop.prompt_cache",
    "train_basis": "vkv.caches.basis.training",
    "validate": "vkv.tools.validate",
}

__all__ = [
    "Accounting",
    "CacheError",
    "CodecError",
    "CodecSpec",
    "Collected",
    "ContainerError",
    "Diff",
    "Difference",
    "DigestError",
    "Entry",
    "Finding",
    "Found",
    "HeaderError",
    "Hit",
    "Info",
    "MismatchError",
    "MissingFileError",
    "NotVkvError",
    "Prompt",
    "PromptStore",
    "Remote",
    "Report",
    "Stats",
    "StoreUnavailableError",
    "TieredStore",
    "UnknownCodecError",
    "UnsupportedError",
    "VkvError",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "prefill",
    "pull",
    "push",
    "save",
    "save_prompt_cache",
    "train_basis",
    "validate",
]


if not TYPE_CHECKING:  # a type checker shall refuse names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'vkv' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
