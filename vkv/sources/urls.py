"""Recognize URLs, and show them without secrets."""

from __future__ import annotations

import re

from vkv._paths import check_path
from vkv.errors import VkvError

#: ``s3://…``; two letters at least, so that ``C:`` is none; ``simplecache::s3://…`` is a chain.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::)")
_SECRET = re.compile(r"(?<=://)[^/@?#]*@|[?#].*$", re.DOTALL)


def is_url(target: object) -> bool:
    """Return whether ``target`` is text that begins like a URL."""
    return isinstance(target, str) and _URL.match(target) is not None


def shown(url: str) -> str:
    """Return ``url`` without what may be secret: user, password, query (signed URLs).

    It is shown to people, and is no address: the object may not be found there.
    """
    return _SECRET.sub("", url)


def in_folder(folder: str, name: str) -> str:
    """Return the URL of ``name`` in a folder; a query (a token) comes after the name."""
    path, query = _split(folder)
    return f"{path.rstrip('/')}/{name}{query}"


def folder_of(url: str) -> str:
    """Return the URL of the folder of an object, with the same credentials and query."""
    path, query = _split(url)
    return path.rpartition("/")[0] + query


def name_of(url: str) -> str:
    """Return the last part of the path of a URL."""
    return _split(url)[0].rpartition("/")[2]


def _split(url: str) -> tuple[str, str]:
    """Split path and query; in the keys of other back ends, ``?`` and ``#`` mean nothing."""
    if not url.lower().startswith(("http://", "https://")):
        return url, ""
    path, mark, query = url.partition("#")[0].partition("?")
    return path, mark + query


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
