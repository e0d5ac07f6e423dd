"""Find the folder for what vkv keeps for its user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder, which may not exist yet.

    It is ``$VKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/vkv``, else ``~/.cache/vkv``.
    """
    if own := os.environ.get("VKV_CACHE_DIR"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vkv"
