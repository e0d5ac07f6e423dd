"""mlx-lm's own two functions, over vkv files: a migration of two words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vkv.caches.loading.load import load
from vkv.caches.saving.save import save


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
    """Load as ``mlx_lm.models.cache.load_prompt_cache`` does, from a ``.vkv`` file.

    Returns:
        The caches, or the caches and the metadata. Raises as ``vkv.load``.
    """
    prompt = load(file_name)
    return (prompt.cache, prompt.info.metadata) if return_metadata else prompt.cache
