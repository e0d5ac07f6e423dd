"""Open a source by path, descriptor, URL, or over bytes."""

from __future__ import annotations

from vkv.sources.base import Source
from vkv.sources.objects import ObjectSource, filesystem


def open_source(url: str) -> Source:
    """Open the bytes behind ``url``.

    Raises:
        OSError: Not found, not allowed, not reached, or neither ranged reads nor small.
        VkvError: A package is missing, or the scheme is unknown.
    """
    files, path = filesystem(url)
    if url.lower().startswith(("http://", "https://")):
        from vkv.sources.http import http_source

        return http_source(files, url)
    return ObjectSource(files, path, url)
