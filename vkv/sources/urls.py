"""Recognize URLs, and show them without secrets."""

from __future__ import annotations

import re

from vkv._paths import check_path
from vkv.errors import VkvError

#: ``s3://…``; two letters at least, so that ``C:`` is none; ``simplecache::s3://…`` is a chain.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::)")
_SECRET = re.compile(r"(?<=://)[^/@?#]*@|[?#].*$", re.DOTALL)


def is_url(target: object) -> bool:
    """Whether ``target`` is text that begins like a URL."""
    return isinstance(target, str) and _URL.match(target) is not None


def shown(url: str) -> str:
    """``url`` without what may be secret: user, password, and a query (signed URLs)."""
    return _SECRET.sub("", url)


def check_local(path: object, name: str = "path") -> None:
    """Refuse to write to a URL.

    Raises:
        VkvError: ``path`` is a URL, or no path at all.
    """
    check_path(path, name)
    if is_url(path):
        raise VkvError(
            f"{name} is a URL ({shown(str(path))}), expected a local path: write the file, then "
            "send it with `vkv store push` or vkv.Remote"
        )
