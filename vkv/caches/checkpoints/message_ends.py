"""Find the ends of messages among the token ids of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vkv import identity

Message = dict[str, Any]
#: Renders a beginning of a conversation as token ids, without what begins an answer.
Render = Callable[[list[Message]], Sequence[int]]


def message_ends(
    ids: Sequence[int], messages: Sequence[Message], render: Render, newest: int
) -> list[int]:
    """Return how many leading ids some beginnings of a conversation share with all of it.

    Args:
        ids: Of the whole conversation.
        messages: Maps with ``role`` and ``content``.
        render: Applies the chat template; what it refuses is left out.
        newest: Beginnings that end in one of so many last messages are asked for, and that
            with the system prompt: each costs a run of the template and the tokenizer.

    Returns:
        Numbers of ids, ascending, each above 0.
    """
    system = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    lengths = {system or 1, *range(max(1, len(messages) - newest + 1), len(messages) + 1)}
    ends = {_shared(ids, messages, n, render) for n in lengths if n <= len(messages)}
    return sorted(ends - {0})


def _shared(ids: Sequence[int], messages: Sequence[Message], count: int, render: Render) -> int:
    """Return how many leading ids the first ``count`` messages share with the conversation.

    Some templates put the system prompt into the first message of the user, so one is added.
    """
    beginning = list(messages[:count])
    if beginning[-1].get("role") == "system":
        beginning.append({"role": "user", "content": ""})
    try:
        return identity.common_prefix(list(render(beginning)), ids)
    except Exception:  # the template is a program of the model's authors
        return 0
