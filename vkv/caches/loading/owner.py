"""Compare the model and the tokenizer of a file with live ones (rule I1)."""

from __future__ import annotations

import warnings
from typing import Any

from vkv import identity
from vkv.caches.loading import compatibility
from vkv.caches.position_deltas import position_deltas
from vkv.errors import MismatchError
from vkv.format.layer_rules import is_basis
from vkv.format.schema import Header, Model, Rope

#: Identity of a live model as ``identity.of_model`` gives it, and the ropes it refers to.
ModelIdentity = tuple[Model, tuple[Rope, ...]]


def check_owner(
    head: Header,
    model: Any,
    tokenizer: Any,
    *,
    known: ModelIdentity | None = None,
    force: bool = False,
) -> None:
    """Compare the file's model and tokenizer with live ones.

    Args:
        head: Of the file.
        model: The live model; ``None`` compares none.
        tokenizer: The live tokenizer, likewise.
        known: Identity of ``model``, where the caller has it: computing it takes some 20 ms.
        force: Warn of differences instead of refusing them.

    Raises:
        MismatchError: They differ (I1).
    """
    wrong, texts = _model_differences(head, model, known), list[str]()
    live = None if tokenizer is None else identity.of_tokenizer(tokenizer)
    if live is not None and head.tokenizer is not None:
        errors, texts = identity.tokenizer_differences(head.tokenizer, live)
        wrong += errors
    if wrong and not force:
        raise MismatchError(wrong)
    for text in (*wrong, *texts):
        warnings.warn(text, UserWarning, stacklevel=3)


def _model_differences(head: Header, model: Any, known: ModelIdentity | None) -> list[str]:
    if model is None:
        return []
    if shifted := position_deltas(model):
        path, values = next(iter(shifted.items()))
        return [
            f"model.{path} is {values}, left by a prompt with an image; the positions of a file "
            "are not shifted: set it to None"
        ]
    live, ropes = known or identity.of_model(model)
    if head.model is not None:
        texts = identity.differences(head.model, head.ropes, live, ropes)
        if texts:
            return texts
    return [] if is_basis(head) else compatibility.differences(head, model)
