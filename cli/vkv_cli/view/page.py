"""Put files or a store into the page, which draws them by itself."""

from __future__ import annotations

import base64
import json
import os
from importlib.resources import files
from typing import Any

from vkv.format.document import open_document
from vkv.format.framing import HEADER
from vkv.store import PromptStore

#: Where the data stands in ``page.html``.
SLOT = "@DATA@"


def file_data(target: str, text: str | None = None) -> dict[str, Any]:
    """Return what the page needs of one file: its name, size, and the bytes before the tensors.

    Args:
        target: A path or a URL.
        text: How its prompt begins, if that is to be shown.

    Raises:
        VkvError: The file breaks a rule.
        OSError: It cannot be read.
    """
    with open_document(target) as document:
        stop = document.entries[HEADER].stop
        head = document.source.read(0, stop)
        return {
            "name": document.name,
            "size": document.size,
            "head": base64.b64encode(head).decode(),
            "text": text,
        }


def store_data(store: PromptStore) -> dict[str, Any]:
    """Return what the page shows of a store: its entries and its statistics."""
    return {
        "root": os.fspath(store.root),
        "stats": store.stats().to_dict(),
        "entries": [entry.to_dict() for entry in store.ls()],
    }


def page(content: dict[str, Any]) -> str:
    """Return the page with ``content`` in it.

    The content is base64, so that nothing that stands in a file can end the element it is in.
    """
    data = base64.b64encode(json.dumps(content).encode()).decode()
    return files("vkv_cli.view").joinpath("page.html").read_text("utf-8").replace(SLOT, data)
