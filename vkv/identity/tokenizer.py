"""Identify a tokenizer."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from vkv.errors import VkvError
from vkv.format.schema import Tokenizer


def of_tokenizer(tokenizer: Any) -> Tokenizer:
    """Identify a tokenizer by the text that each id stands for, and by its special ids.

    The end-of-text token and the padding token are left out: people set them anew
    when they load a model, and no cached token changes by that. Nothing of the
    library's own serialization is used, since it changes with its version.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, a tokenizer of transformers, or one of
            ``tokenizers``.

    Returns:
        The identity, with the digest of the chat template apart.

    Raises:
        VkvError: It has no ``get_vocab``.
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise VkvError(
            f"a {type(tokenizer).__qualname__}, expected a tokenizer with get_vocab",
            rule="I3",
            at="tokenizer",
        )
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = blake3()
    for index, token in vocabulary:
        text = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d %b\n" % (index, len(text), text))
    digest.update(b"special %b\n" % json.dumps(_special(tokenizer)).encode())
    return Tokenizer(id=digest.digest(), vocab_size=len(vocabulary), template=_template(tokenizer))


def _special(tokenizer: Any) -> list[int]:
    """Return ids that are matched as a whole and skipped in output, and the first token's."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    special = {index for index, token in (added or {}).items() if token.special}
    first = getattr(tokenizer, "bos_token_id", None)
    return sorted(special if first is None else special | {first})


def _template(tokenizer: Any) -> bytes | None:
    """Digest of the chat template: one text, or several by name."""
    template = getattr(tokenizer, "chat_template", None)
    renderer = getattr(tokenizer, "_chat_template", None)  # mlx-lm's, in Python
    if renderer is not None:
        template = f"{renderer.__module__}.{getattr(renderer, '__qualname__', '')}"
    if template is None:
        return None
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True, default=str)
    return blake3(template.encode("utf-8", "surrogatepass")).digest()
