"""What a request may say, checked before it reaches the thread that serves everyone."""

from __future__ import annotations

import json
from typing import Any

#: Bytes of a request. A prompt of a million tokens has some five million.
MAX_BODY = 64 << 20
#: Above, a number does not fit where mlx-lm puts it.
_LARGEST = 2**31 - 1


_COUNTS = {
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "top_logprobs", "num_draft_tokens", "repetition_penalty", "repetition_context_size",
    "presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size",
}  # fmt: skip
#: What of ``chat_template_kwargs`` speaks to the tokenizer and not to the model's template: a
#: template of the client's own never ends if it likes, a padding is as long as it says.
_NOT_OF_TEMPLATE = {
    "chat_template", "conversation", "tokenize", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
}  # fmt: skip


class RequestError(Exception):
    """A request that is not answered, as the OpenAI API says it.

    Args:
        message: What was found, then what was expected.
        param: The parameter at fault.
        status: Of HTTP.
        code: For programs, e.g. ``"model_not_found"``.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def length(text: str | None) -> int:
    """Bytes of a body, from ``Content-Length``.

    Raises:
        RequestError: There is none, or it is no number, or it is too large.
    """
    if text is None:
        raise RequestError("no Content-Length, expected the length of the body", status=411)
    if not (text.isascii() and text.isdigit()):
        raise RequestError(f"Content-Length is {text[:40]!r}, expected a number")
    if len(text) > 18 or int(text) > MAX_BODY:
        raise RequestError(f"a body of {text[:40]} bytes, at most {MAX_BODY:,}", status=413)
    return int(text)


def parsed(data: bytes, *, chat: bool) -> dict[str, Any]:
    """The body of a request for a completion.

    ``mlx_lm.server`` checks types and ranges of most numbers itself.

    Args:
        data: All of it.
        chat: Whether it has messages, not a prompt.

    Raises:
        RequestError: Not JSON, or what would end the thread that generates.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"the body is not JSON: {exc}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {_kind(body)}, expected an object")
    if chat:
        _messages(body.get("messages"))
        _template(body.get("chat_template_kwargs"))
    else:
        body["prompt"] = _prompt(body.get("prompt"))
    _stop(body.get("stop"))
    _numbers(body)
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise RequestError(f"{_kind(options)}, expected an object", "stream_options")
        options.setdefault("include_usage", False)
    return body


def _prompt(found: Any) -> str:
    """The one text; a list of one is that one."""
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, str):
        what = f"a list of {len(found)}" if isinstance(found, list) else _kind(found)
        raise RequestError(f"prompt is {what}, expected one text", "prompt")
    if not _is_text(found):
        raise RequestError("prompt is empty, or no Unicode", "prompt")
    return found


def _messages(found: Any) -> None:
    if not isinstance(found, list) or not found:
        what = "an empty list" if found == [] else _kind(found)
        raise RequestError(f"messages is {what}, expected a list of messages", "messages")
    for i, message in enumerate(found):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{at} is no object with a role", at)
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not all(isinstance(part, dict) for part in parts):
            raise RequestError(f"{at}.content has a part that is no object", f"{at}.content")
        if not isinstance(content, str | list | None):
            text = f"{at}.content is {_kind(content)}, expected a text or a list of parts"
            raise RequestError(text, f"{at}.content")


def _template(found: Any) -> None:
    at = "chat_template_kwargs"
    if not isinstance(found, dict | None):
        raise RequestError(f"{at} is {_kind(found)}, expected an object", at)
    for name in sorted(_NOT_OF_TEMPLATE & (found or {}).keys()):
        text = f"{at} has {name}, expected what the template of the model takes"
        raise RequestError(text, f"{at}.{name}")


def _stop(found: Any) -> None:
    words = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(word, str) and _is_text(word) for word in words):
        raise RequestError("stop is expected to be a text or a list of texts, none empty", "stop")


def _numbers(body: dict[str, Any]) -> None:
    """Those whose range ``mlx_lm.server`` does not know."""
    for name in ("max_tokens", "max_completion_tokens"):
        found = body.get(name)
        if isinstance(found, int) and not 1 <= found <= _LARGEST:
            raise RequestError(f"{name} is {_short(found)}, expected 1 to {_LARGEST}", name)
        if found is None:
            body.pop(name, None)  # as if it were not there
    seed = body.get("seed")
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        raise RequestError(f"seed is {_short(seed)}, expected 0 to 2**63 - 1", "seed")
    for name in _COUNTS & body.keys():
        if isinstance(body[name], bool):  # an int, to Python
            raise RequestError(f"{name} is {body[name]}, expected a number", name)
    for name, value in body.items():
        if isinstance(value, int | float) and name != "seed" and not _is_number(value):
            raise RequestError(f"{name[:40]} is {_short(value)}, at most {_LARGEST}", name[:40])
    bias = body.get("logit_bias")
    for key, value in bias.items() if isinstance(bias, dict) else ():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and _is_number(value)):
            text = f"{key[:20]!r}: {_kind(value)}, expected a token id and a number"
            raise RequestError(text, "logit_bias")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _short(value: float) -> str:
    """A number of any length; one of 5,000 digits has no decimal form."""
    long = isinstance(value, int) and abs(value) > 10**20
    return "too long" if long else str(value)


def _is_text(value: str) -> bool:
    try:
        return bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _kind(value: Any) -> str:
    names = {"NoneType": "missing", "dict": "an object", "list": "a list", "str": "a text"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
