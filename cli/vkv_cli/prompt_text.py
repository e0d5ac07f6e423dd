"""Turn the first token ids of a file into words."""

from __future__ import annotations

import os
from typing import Any

from vkv.errors import VkvError
from vkv.format.document import open_document
from vkv.format.info import Info
from vkv_cli import quiet

#: Tokens that are shown; a line of a terminal holds fewer.
TOKENS = 64


def beginning(info: Info, tokenizer: str | None = None) -> str:
    """Return how the prompt of a file begins, on one line.

    Only a tokenizer on this machine is used: a file may name one of anybody.

    Args:
        info: The file.
        tokenizer: A folder with a tokenizer; by default the model that the file names.

    Raises:
        VkvError: The file has no token ids, or the tokenizer is missing.
        MismatchError: It is not the one that the file was made with (I1).
    """
    from vkv.caches.loading.owner import check_owner  # brings MLX

    if info.header.tokens is None:
        raise VkvError("the file holds no token ids, so there is no text", at=info.path)
    folder = tokenizer or info.metadata.get("model", "")
    if not os.path.isdir(folder):
        what = f"{folder!r} is no folder here" if folder else "the file names no model"
        raise VkvError(f"{what}: pass --tokenizer DIR for --text", at=info.path)
    loaded = _loaded(folder)
    check_owner(info.header, None, loaded)
    with open_document(info.path) as document:
        ids = memoryview(document.read(info.header.tokens.tensor)).cast("I")[:TOKENS].tolist()
    words = " ".join(str(loaded.decode(ids)).split())
    return f"“{words}{'…' if info.header.tokens.count > TOKENS else ''}”"


def _loaded(folder: str) -> Any:
    quiet.silence_libraries()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as exc:  # any of transformers and tokenizers
        raise VkvError(f"cannot load a tokenizer: {quiet.one_line(exc)}", at=folder) from exc
