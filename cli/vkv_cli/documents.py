"""Read documents from a folder of text files, or from a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkv.errors import VkvError
from vkv_cli.streams import decoded, read_text


@dataclass(frozen=True, slots=True)
class DocumentText:
    """One document.

    Attributes:
        name: For people; the entry of the store gets it.
        at: Where it was read, for messages.
        text: Its text, or ``None`` if it could not be read.
        trouble: Why it could not be read.
    """

    name: str
    at: str
    text: str | None = None
    trouble: str = ""


def documents(source: Path) -> Iterator[DocumentText]:
    """Yield the documents of a folder or of a JSON-lines file; bad ones with their trouble.

    A folder gives its files, those in folders below too, in the order of their paths; names
    that begin with a dot are left out. A line is an object with ``text`` and, if it likes,
    ``name``; lines without a name have the number of the line.

    Raises:
        OSError: ``source`` cannot be read.
    """
    return _of_folder(source) if source.is_dir() else _of_lines(source)


def _of_folder(folder: Path) -> Iterator[DocumentText]:
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        name = relative.as_posix()
        try:
            yield _filled(name, str(path), read_text(path, str(path)))
        except (VkvError, OSError) as exc:
            reason = exc.message if isinstance(exc, VkvError) else exc.strerror or str(exc)
            yield DocumentText(name, str(path), trouble=reason)


def _of_lines(path: Path) -> Iterator[DocumentText]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _of_line(line, number, f"{path}:{number}")


def _of_line(line: bytes, number: int, at: str) -> DocumentText:
    try:
        value: Any = json.loads(decoded(line, at))
    except VkvError as exc:
        return DocumentText(str(number), at, trouble=exc.message)
    except (ValueError, RecursionError) as exc:
        return DocumentText(str(number), at, trouble=f"not JSON: {exc}")
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return DocumentText(str(number), at, trouble='expected an object with "text"')
    name = value.get("name", str(number))
    if not isinstance(name, str):
        return DocumentText(str(number), at, trouble='"name" is no text')
    try:
        (value["text"] + name).encode()
    except UnicodeEncodeError:  # JSON can escape half a character
        return DocumentText(str(number), at, trouble="holds half a character")
    return _filled(name, at, value["text"])


def _filled(name: str, at: str, text: str) -> DocumentText:
    return DocumentText(name, at, text) if text.strip() else DocumentText(name, at, trouble="empty")
