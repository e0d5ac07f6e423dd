"""Apply chat templates: ids of a prompt that stays open, and of the turn that goes on from it.

A file holds token ids, not messages. Where its last message ends is read from
its text, by comparing it with what the template puts around messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vkv.errors import VkvError
from vkv.identity import common_prefix

Messages = Sequence[Mapping[str, Any]]

#: Words that no template changes, put where a message will be.
_QUERY, _ANSWER = "<query>", "<answer>"
#: Where held text and new text meet, words may join into other tokens; only so
#: many of the last ids may change, or the ids are no canonical encoding at all.
SLACK = 8


def opening(tokenizer: Any, messages: Messages, **options: Any) -> list[int]:
    """Return the token ids of a conversation that is to be continued.

    A last message of the user stays open, as in ``mlx_lm.cache_prompt``; after one
    of the system a message of the user begins; one of the assistant is closed.

    Args:
        tokenizer: One with a chat template.
        messages: Maps with ``role`` and ``content``.
        options: Passed on to the template.

    Raises:
        VkvError: There is no template, or it refuses the messages.
    """
    role = messages[-1].get("role") if messages else None
    if role == "system":
        query = [*messages, {"role": "user", "content": _QUERY}]
        text = _before(_render(tokenizer, query, **options), _QUERY)
    else:
        end = {"continue_final_message": True} if role == "user" else {}
        text = _render(tokenizer, messages, **end, **options)
    return encode(tokenizer, text)


def continued(
    tokenizer: Any, tokens: Sequence[int], text: str, *, plain: bool = False, **options: Any
) -> tuple[list[int] | None, list[int]]:
    """Return the ids of a conversation with one more message: anew, and appended.

    Args:
        tokenizer: The tokenizer of the model.
        tokens: The conversation so far.
        text: A message of the user, or the rest of one that is open.
        plain: No chat template: ``text`` follows as it is.
        options: Passed on to the template.

    Returns:
        The whole text encoded at once, where words that meet join into other tokens, or
        ``None`` where it has nothing to do with ``tokens``; and ``tokens`` with the ids of
        what follows behind them.

    Raises:
        VkvError: The template refuses the message.
    """
    held = tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""
    rest = text if plain else remainder(tokenizer, held, text, **options)
    appended = [*tokens, *encode(tokenizer, rest)]
    joined = encode(tokenizer, held + rest)
    near = len(tokens) - common_prefix(tokens, joined) <= SLACK
    return joined if near else None, appended


def remainder(tokenizer: Any, held: str, text: str, **options: Any) -> str:
    """Return what follows ``held``, the text so far, up to where the model answers ``text``.

    If ``held`` ends inside a message of the user, ``text`` goes on with it. Else
    the present message is closed, as far as it is not, and a new one begun.
    """
    if not held:
        return _render(tokenizer, [_user(text)], add_generation_prompt=True, **options)
    first = _render(tokenizer, [_user(_QUERY)], add_generation_prompt=True, **options)
    turns = [_user(_QUERY), {"role": "assistant", "content": _ANSWER}, _user(_QUERY)]
    later = _render(tokenizer, turns, add_generation_prompt=True, **options)
    head, tail = _before(first, _QUERY), first[first.index(_QUERY) + len(_QUERY) :]
    answer, between = _around(later)
    begins_answer = tail[: common_prefix(tail, answer)]
    begins_query = head[len(head) - common_prefix(head[::-1], between[::-1]) :]
    at = held.rfind(begins_answer) if begins_answer.strip() else -1
    since = held[at + len(begins_answer) :] if at >= 0 else held
    rendered = _render(tokenizer, [_user(text)], add_generation_prompt=True, **options)
    if begins_query in since:
        return rendered[len(head) :]
    return between[_overlap(since, between) :] + rendered[len(head) :]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of ``text``, which has its special tokens in it already."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _render(tokenizer: Any, messages: Messages, **options: Any) -> str:
    if not tokenizer.has_chat_template:
        raise VkvError("the tokenizer has no chat template")
    options = {"add_generation_prompt": False, **options}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as exc:  # the template is a program of the model's authors
        raise VkvError(f"the chat template refuses the messages: {exc}") from exc


def _before(text: str, mark: str) -> str:
    head, found, _ = text.partition(mark)
    if not found:
        raise VkvError("the chat template drops the message")
    return head


def _around(later: str) -> tuple[str, str]:
    """Return what the template puts between a query and its answer, and before the next query."""
    after_query = later[len(_before(later, _QUERY)) + len(_QUERY) :]
    answer = _before(after_query, _ANSWER)
    return answer, _before(after_query[len(answer) + len(_ANSWER) :], _QUERY)


def _overlap(text: str, following: str) -> int:
    """Return the length of the longest start of ``following`` that ``text`` ends with."""
    return next((n for n in range(len(following), 0, -1) if text.endswith(following[:n])), 0)
