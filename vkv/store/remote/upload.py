"""Send files to a remote: whole or not at all, and for their owner alone where modes exist."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from vkv.sources.backend_errors import naming

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from vkv.store.remote.transfer import Progress

#: Back ends where an object appears whole when its upload ends, or not at all.
WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "hf", "memory"})


def upload(
    files: AbstractFileSystem,
    path: Path,
    root: str,
    target: str,
    url: str,
    progress: Progress | None = None,
    *,
    temp: str | None = None,
) -> None:
    """Send a file to ``root/target``, where it appears whole or not at all.

    Args:
        files: The file system.
        path: The local file.
        root: A folder there.
        target: The object's path below ``root``.
        url: Of the object, for messages.
        progress: Called with (bytes done, bytes in all).
        temp: A path below ``root`` that holds the bytes until all have come, where the file
            system needs one; a new one in ``incoming`` by default.

    Raises:
        OSError: It cannot be read or stored; nothing has the name ``target``.
    """
    from fsspec.callbacks import Callback

    def tell(size: int | None, value: int, **_: object) -> None:
        if progress is not None and size:
            progress(value, size)

    options = {"callback": Callback(hooks={"progress": tell})}
    with naming(url):
        if is_flat(files):
            files.put_file(os.fspath(path), f"{root}/{target}", **options)
            return
        temp = f"{root}/{temp or f'incoming/{os.getpid()}-{secrets.token_hex(4)}'}"
        for name in (temp, f"{root}/{target}"):
            _make_folder(files, name)
        try:
            _make_private(files, temp)
            files.put_file(os.fspath(path), temp, **options)
            files.mv(temp, f"{root}/{target}")
        except BaseException:
            with contextlib.suppress(Exception):
                files.rm_file(temp)
            raise


def make_empty(files: AbstractFileSystem, paths: list[str]) -> None:
    """Make empty objects; those that exist stay."""
    if not is_flat(files):
        for path in paths:
            _make_folder(files, path)
            _make_private(files, path)
    if not _is_local(files):
        files.pipe(dict.fromkeys(paths, b""))


def is_flat(files: AbstractFileSystem) -> bool:
    """Return whether objects appear whole, and directories need not be made."""
    return not WHOLE.isdisjoint(_protocols(files))


def _is_local(files: AbstractFileSystem) -> bool:
    return "file" in _protocols(files)


def _protocols(files: AbstractFileSystem) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _make_folder(files: AbstractFileSystem, name: str) -> None:
    """Make the folder of an object; on a local disk for its owner alone: names tell of prompts."""
    folder = PurePosixPath(name).parent
    if not _is_local(files):
        files.makedirs(os.fspath(folder), exist_ok=True)
        return
    missing = [p for p in (folder, *folder.parents) if not os.path.isdir(p)]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _make_private(files: AbstractFileSystem, name: str) -> None:
    """Make an empty file that its owner alone can read, before bytes come into it."""
    if _is_local(files):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600))
