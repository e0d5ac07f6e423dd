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
    wrong, texts = _model_differences(head, model, known)
    live = None if tokenizer is None else identity.of_tokenizer(tokenizer)
    if live is not None and head.tokenizer is not None:
        errors, more = identity.tokenizer_differences(head.tokenizer, live)
        wrong, texts = wrong + errors, texts + more
    if wrong and not force:
        raise MismatchError(wrong)
    for text in (*wrong, *texts):
        warnings.warn(text, UserWarning, stacklevel=3)


def _model_differences(
    head: Header, model: Any, known: ModelIdentity | None
) -> tuple[list[str], list[str]]:
    """Return differences between the file's model and a live one: errors, and warnings."""
    if model is None:
        return [], []
    if shifted := position_deltas(model):
        path, values = next(iter(shifted.items()))
        text = (
            f"model.{path} is {values}, left by a prompt with an image; the positions of a file "
            "are not shifted: set it to None"
        )
        return [text], []
    live, ropes = known or identity.of_model(model)
    harmless: list[str] = []
    if head.model is not None:
        texts = identity.differences(head.model, head.ropes, live, ropes)
        if texts:
            return texts, []
        harmless = identity.unread_differences(head.model, live)
    return [] if is_basis(head) else compatibility.differences(head, model), harmless
