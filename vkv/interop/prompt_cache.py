"""mlx-lm's own two functions, over vkv files: a migration of two words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vkv.caches.kinds import live
from vkv.caches.kinds.adapter import Loaded, Snapshot, Value
from vkv.caches.loading.load import load
from vkv.caches.saving.save import save
from vkv.errors import NotVkvError
from vkv.interop import files
from vkv.interop.layers import check_codes


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save as ``mlx_lm.models.cache.save_prompt_cache`` does, into a ``.vkv`` file, losslessly.

    Neither tokens nor a model are known here, so ``vkv.load`` cannot check them:
    prefer ``vkv.save``. Raises as ``vkv.save``.
    """
    save(file_name, cache, metadata=metadata)


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Load as ``mlx_lm.models.cache.load_prompt_cache`` does, from a ``.vkv`` file or mlx-lm's.

    Returns:
        The caches, or the caches and the metadata. Raises as ``vkv.load``.
    """
    try:
        prompt = load(file_name)
    except NotVkvError:  # safetensors, so it may be one of mlx-lm's
        snapshots, metadata = files.read(file_name)
        for i, snapshot in enumerate(snapshots):
            check_codes(snapshot, f"layers[{i}]")
        caches = [_restore(snapshot) for snapshot in snapshots]
        return (caches, metadata) if return_metadata else caches
    return (prompt.cache, prompt.info.metadata) if return_metadata else prompt.cache


def _restore(saved: Snapshot) -> Any:
    """Make the live cache, and those inside it, of a snapshot read from a file of mlx-lm."""
    loaded: Loaded = {name: _loaded(value) for name, value in saved.values.items()}
    if saved.children:
        loaded["children"] = [_restore(child) for child in saved.children]
    return live.make(saved.kind, dict(saved.scalars), loaded)


def _loaded(value: Value) -> Any:
    """Return an array, or codec and parts of a cache that keeps codes (one run, L4)."""
    if not value.encoded:
        return value.x
    (run,) = value.encoded
    return run.codec, run.parts
