"""Send and fetch a single file behind any URL that fsspec knows, without a store."""

from __future__ import annotations

import os
from pathlib import Path

from vkv._atomic import temporary_name
from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.info import Info, inspect
from vkv.format.layers import external_references
from vkv.format.target import check_target
from vkv.sources.objects import filesystem
from vkv.sources.urls import in_folder, is_url, name_of, shown
from vkv.store.remote import transfer, upload
from vkv.store.remote.transfer import Progress


def push(
    path: str | os.PathLike[str],
    url: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Info:
    """Send one file to a URL, and check there that it arrived.

    Every byte is checked before it is sent. The object appears whole or not at all. One
    that is there already, with the same id, is not sent again. The file alone is sent: what
    it depends on is in ``dependencies`` of the result. Credentials are found by the library
    of the scheme, in its own places.

    Args:
        path: A local ``.vkv`` file.
        url: Such as ``s3://bucket/a.vkv`` or ``hf://datasets/me/prompts/a.vkv``. One that ends
            with a slash is a folder, in which the file keeps its name.
        force: Replace what is there, if it is not this file.
        progress: Called with (bytes done, bytes in all).

    Returns:
        What stands at the URL, read from there.

    Raises:
        VkvError: The file is damaged; another file is there; the URL cannot be written; or
            what arrived is not what was sent.
        OSError: The file cannot be read, or the URL not be reached.
    """
    target = _target(url, os.path.basename(os.fspath(path)))
    with open_document(os.fspath(path)) as document:
        transfer.check(document, document.id)
        key, size = document.id, document.size
    if _differs(target, key, size, force):
        _send(Path(path), target, progress)
    info = inspect(target)
    if (info.id, info.size) != (key, size):
        text = f"found id {info.id[:16]}… of {info.size:,} bytes, expected {key[:16]}… of {size:,}"
        raise VkvError(f"it did not arrive as it was sent: {text}", at=shown(target))
    return info


def pull(url: str, dest: str | os.PathLike[str], *, progress: Progress | None = None) -> Info:
    """Fetch one file from a URL; it takes its name when every byte is checked.

    An existing file is replaced in one step. A transfer that was interrupted is continued
    from ``.NAME.ID.vkv-part`` beside ``dest``. The file alone is fetched: what it depends on is
    in ``dependencies`` of the result.

    Args:
        url: Of a ``.vkv`` file, by any scheme that ``vkv.load`` reads.
        dest: The file to write, or a folder, in which it keeps the name it has in the URL.
        progress: Called with (bytes done, bytes in all).

    Raises:
        VkvError: ``url`` is no URL, its bytes are damaged, or ``dest`` is a file that the
            new one depends on (L10).
        OSError: The URL cannot be read, or ``dest`` not be written.
    """
    if not is_url(url):
        raise VkvError(f"{url!r} is no URL, expected one like s3://bucket/a.vkv")
    path = Path(dest)
    path = path / name_of(url) if path.is_dir() else path
    with open_document(url) as document:
        check_target(path, external_references(document.header))
        part = transfer.partial_path(path, document.id)
        transfer.download(document, document.id, path, part, progress)
    return inspect(path)


def _target(url: str, name: str) -> str:
    """Return the URL of the object to write."""
    if not is_url(url):
        raise VkvError(f"{url!r} is no URL, expected one like s3://bucket/{name}")
    if url.lower().startswith(("http://", "https://")):
        raise VkvError("http can be read and not written", at=shown(url))
    return in_folder(url, name) if url.endswith("/") else url


def _differs(target: str, key: str, size: int, force: bool) -> bool:
    """Return whether the file has to be sent.

    Raises:
        VkvError: Something else is there, and ``force`` is not given.
    """
    try:
        with open_document(target) as there:
            if (there.id, there.size) == (key, size):
                return False
            found = f"the file {there.id[:16]}…"
    except FileNotFoundError:
        return True
    except VkvError:
        found = "something that is no sound vkv file"
    if not force:
        text = f"found {found}, expected nothing or {key[:16]}…; force=True (--force) replaces it"
        raise VkvError(text, at=shown(target))
    return True


def _send(path: Path, target: str, progress: Progress | None) -> None:
    files, where = filesystem(target)
    root, _, name = where.rpartition("/")
    upload.upload(files, path, root, name, target, progress, temp=temporary_name(name))
