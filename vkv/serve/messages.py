"""Check the messages of a chat, and what goes to the chat template beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from msgspec import Struct

from vkv.serve.body import convert
from vkv.serve.request_error import RequestError

#: Options of the tokenizer that ``chat_template_kwargs`` could reach. A template of the
#: client's own may run for ever; a padding is as long as it says.
_NOT_OF_TEMPLATE = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
#: Types of content parts that hold an image, as mlx-lm names them.
IMAGE_TYPES = ("image_url", "input_image", "image")

Part: TypeAlias = dict[str, Any]


class _Function(Struct, kw_only=True):
    """Hold the function of a tool call; mlx-lm decodes ``arguments`` as JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(Struct, kw_only=True):
    """Hold a tool call of an earlier answer."""

    function: _Function | None = None


class _Message(Struct, kw_only=True):
    """Hold one message. A template may read other fields, so they are left alone."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[_ToolCall] | None = None


class _TextPart(Struct, kw_only=True):
    """Hold a part of a message that is text."""

    text: str


class _Url(Struct, kw_only=True):
    """Hold the URL of an image."""

    url: str
    detail: str | None = None


class _ImagePart(Struct, kw_only=True):
    """Hold a part of a message that is an image."""

    image_url: str | _Url | None = None
    image: str | _Url | None = None


def check(messages: list[dict[str, Any]]) -> None:
    """Check the type of each message and of each part of its content.

    Raises:
        RequestError: With the place of the first fault, e.g. ``messages[2].content[0]``.
    """
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        content = convert(message, _Message, at).content
        for j, part in enumerate(content if isinstance(content, list) else ()):
            _check_part(part, f"{at}.content[{j}]")


def _check_part(part: Part, at: str) -> None:
    kind = part.get("type")
    if kind == "text":
        convert(part, _TextPart, at)
    elif kind in IMAGE_TYPES:
        if image_url(convert(part, _ImagePart, at)) is None:
            raise RequestError(f"{at} has no URL, expected image_url", at)
    else:
        raise RequestError(f"{at}.type is {str(kind)[:40]!r}, expected 'text'", f"{at}.type")


def image_url(part: _ImagePart) -> str | None:
    """Return the URL of an image part."""
    source = part.image if part.image_url is None else part.image_url
    return source.url if isinstance(source, _Url) else source


def images(messages: list[dict[str, Any]]) -> Iterator[tuple[str, Part, str]]:
    """Yield (place, part, URL) of each image in checked messages."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] in IMAGE_TYPES:
                at = f"messages[{i}].content[{j}]"
                yield at, part, str(image_url(convert(part, _ImagePart, at)))


def check_template(options: dict[str, Any] | None) -> None:
    """Refuse options of the tokenizer among those for the chat template.

    Raises:
        RequestError: If ``options`` has such a name.
    """
    for name in sorted(_NOT_OF_TEMPLATE & (options or {}).keys()):
        at = f"chat_template_kwargs.{name}"
        raise RequestError(f"{at} is set, expected variables of the model's template only", at)
