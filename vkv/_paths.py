"""Check paths, and find the folder for what vkv keeps for its user."""

from __future__ import annotations

import os
from pathlib import Path

from vkv.errors import VkvError


def cache_dir() -> Path:
    """Return the cache folder, which may not exist yet.

    It is ``$VKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/vkv``, else ``~/.cache/vkv``.
    """
    if own := os.environ.get("VKV_CACHE_DIR"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vkv"


def check_path(path: object, name: str = "path") -> None:
    """Refuse what is no path. A number would be taken for an open file.

    Args:
        path: What the caller gave.
        name: Of the argument, for the message.

    Raises:
        VkvError: Neither text nor ``os.PathLike``.
    """
    if not isinstance(path, str | os.PathLike):
        raise VkvError(f"{name} is a {type(path).__name__}, expected str or os.PathLike")
