"""Read objects of any file system that fsspec knows: s3, gs, hf, file and others.

fsspec is imported when a URL is opened and not before; credentials and proxies
come from the environment and the configuration that fsspec reads.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from vkv.errors import ContainerError, VkvError
from vkv.sources.backend_errors import INSTALL, naming
from vkv.sources.base import FIRST_READ
from vkv.sources.ranged import RangedSource
from vkv.sources.urls import shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_S3 = ("s3", "s3a")
#: Tries of one request to S3.
MAX_TRIES = 3
#: Option of aiohttp: proxies of the environment.
_WITH_PROXIES: dict[str, object] = {"trust_env": True}
#: Options of botocore: seconds, and no tries of its own.
_S3_TIMES: dict[str, object] = {
    "connect_timeout": 10,
    "read_timeout": 30,
    "retries": {"max_attempts": 0},
}


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's file system behind ``url``, and the path in it.

    Listings are not cached: other machines write there too.

    Raises:
        OSError: It cannot be reached.
        VkvError: A package is missing, or the scheme is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise VkvError(f"a URL needs the package fsspec: {INSTALL}", at=shown(url)) from None
    with naming(url):
        files, path = url_to_fs(url, use_listings_cache=False, **_options(url))
    link: AbstractFileSystem | None = files
    while link is not None:
        if _S3[0] in link.protocol:
            link.retries = MAX_TRIES  # of s3fs, beside those of botocore
        link = getattr(link, "fs", None)
    return files, path


def _options(url: str) -> dict[str, dict[str, object]]:
    """Return options for fsspec, by scheme, for each link of a chain (``simplecache::s3://…``).

    http(s) uses the proxies of the environment, as other back ends do. S3 gives up in
    time, and does not try again inside each try. The configuration of fsspec may override both.
    """
    from fsspec.config import conf

    found: dict[str, dict[str, object]] = {}
    for scheme in {link.partition(":")[0].lower() for link in url.split("::")}:
        if scheme in ("http", "https"):
            name, own = "client_kwargs", _WITH_PROXIES
        elif scheme in _S3:
            name, own = "config_kwargs", _S3_TIMES
        else:
            continue
        found[scheme] = {name: own | conf.get(scheme, {}).get(name, {})}
    return found


class ObjectSource(RangedSource):
    """An object of any file system of fsspec."""

    def __init__(self, files: AbstractFileSystem, path: str, url: str):
        super().__init__(url)
        self._files, self._path = files, path
        with naming(url):
            info = files.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), shown(url))
        if info["size"] is None:
            raise OSError(errno.EIO, "the server does not say its size", shown(url))
        self.size = int(info["size"])
        self._head = self.read(0, min(self.size, FIRST_READ))

    def _fetch(self, start: int, buffer: memoryview) -> None:
        with naming(self.url):
            data = self._files.cat_file(self._path, start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise ContainerError(
                f"ends at byte {start + len(data)}, expected {start + len(buffer)}", rule="C1"
            )
        buffer[:] = data
