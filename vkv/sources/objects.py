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


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """fsspec's file system behind ``url``, and the path in it.

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
        files, path = url_to_fs(url, use_listings_cache=False)
    return files, path


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
            raise OSError(errno.EIO, "the server does not tell its size", shown(url))
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
