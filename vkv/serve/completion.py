"""Check a request for a completion as a whole, and give mlx_lm.server what it asks for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from vkv.serve import messages
from vkv.serve.body import decode
from vkv.serve.request import NEUTRAL, ChatRequest, TextRequest
from vkv.serve.request_error import RequestError

#: Below, the inverse is no float16, in which a model may compute.
_MIN_TEMPERATURE = 0.001
_MIN_REPETITION = 0.01
#: mlx-lm 0.31 sums probabilities in the dtype of the model, so a smaller top_p may leave
#: no token at all.
_MIN_TOP_P = 0.05


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Hold what a model allows a request to say.

    Args:
        vocabulary: Number of logits.
        context: Most tokens of a prompt and its answer together.
        images: True if the model takes images.
    """

    vocabulary: int
    context: int
    images: bool


def parse(data: bytes, *, chat: bool) -> ChatRequest | TextRequest:
    """Decode and check a body, as far as that needs no model.

    Args:
        data: The whole body.
        chat: True for messages, False for a prompt.

    Raises:
        RequestError: With the first parameter at fault.
    """
    body: ChatRequest | TextRequest
    body = decode(data, ChatRequest) if chat else decode(data, TextRequest)
    _check_neutral(body)
    _check_numbers(body)
    if body.stream and (body.logprobs or (body.top_logprobs or 0) > 0):
        name = "logprobs" if body.logprobs else "top_logprobs"
        raise RequestError(f"{name} is set, but a streamed answer has no log probabilities", name)
    if isinstance(body, ChatRequest):
        messages.check(body.messages)
        messages.check_template(body.chat_template_kwargs)
    return body


def _check_neutral(body: ChatRequest | TextRequest) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == x and type(value) is type(x) for x in neutral):
            raise RequestError(f"{name} is set, but this server does not support it", name)


def _check_numbers(body: ChatRequest | TextRequest) -> None:
    """Check ranges that have a gap between 0, which means off, and the least value."""
    old = version("mlx-lm").startswith("0.31.")
    for name, value, least in (
        ("temperature", body.temperature, _MIN_TEMPERATURE),
        ("repetition_penalty", body.repetition_penalty, _MIN_REPETITION),
        ("top_p", body.top_p, _MIN_TOP_P if old else 0),
    ):
        if value and value < least:
            raise RequestError(f"{name} is {value}, expected 0 or at least {least}", name)
    if old and body.xtc_probability:
        raise RequestError("xtc_probability is set, which needs mlx-lm 0.32", "xtc_probability")


def check_limits(body: ChatRequest | TextRequest, limits: ModelLimits) -> None:
    """Check a request against the model that will answer it.

    Raises:
        RequestError: If ``logit_bias`` has a token beyond the vocabulary, or the request
            has images and the model takes none.
    """
    biased = max(body.logit_bias or (0,))
    if biased >= limits.vocabulary:  # MLX would write beyond the logits
        text = f"logit_bias has token {biased}, the vocabulary has {limits.vocabulary}"
        raise RequestError(text, "logit_bias")
    if isinstance(body, ChatRequest) and not limits.images:
        for at, _, _ in messages.images(body.messages):
            raise RequestError(f"{at} is an image, but the model takes text only", at)


def settings(
    body: ChatRequest | TextRequest, limits: ModelLimits, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the attributes that ``mlx_lm.server.APIHandler`` reads, by their names.

    Args:
        body: The checked request.
        limits: Of the model.
        args: Flags of the server, which give the defaults.
    """
    top_k = _or(body.top_k, args.top_k)
    limit = body.max_completion_tokens or body.max_tokens or args.max_tokens
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return {
        "stream": bool(body.stream),
        "stream_options": {"include_usage": usage},
        "requested_model": body.model or "default_model",
        "requested_draft_model": "default_model",
        "num_draft_tokens": args.num_draft_tokens,
        "adapter": None,
        "max_tokens": limit,
        "temperature": _or(body.temperature, args.temp),
        "top_p": _or(body.top_p, args.top_p),
        "top_k": 0 if top_k >= limits.vocabulary else top_k,  # 0 stands for all tokens
        "min_p": _or(body.min_p, args.min_p),
        "repetition_penalty": _or(body.repetition_penalty, 0.0),
        "repetition_context_size": _or(body.repetition_context_size, 20),
        "presence_penalty": _or(body.presence_penalty, 0.0),
        "presence_context_size": _or(body.presence_context_size, 20),
        "frequency_penalty": _or(body.frequency_penalty, 0.0),
        "frequency_context_size": _or(body.frequency_context_size, 20),
        "xtc_probability": _or(body.xtc_probability, 0.0),
        "xtc_threshold": _or(body.xtc_threshold, 0.1),
        "logit_bias": body.logit_bias,
        "logprobs": bool(body.logprobs),
        "top_logprobs": min(_or(body.top_logprobs, -1), limits.vocabulary),
        "seed": body.seed,
        "chat_template_kwargs": getattr(body, "chat_template_kwargs", None),
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def stop_words(body: ChatRequest | TextRequest) -> list[str]:
    """Return the texts that end an answer."""
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def content(body: ChatRequest | TextRequest) -> dict[str, Any]:
    """Return the fields of ``mlx_lm.server.CompletionRequest`` by name."""
    common = {"role_mapping": None}
    if isinstance(body, TextRequest):
        prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
        return common | {"request_type": "text", "prompt": prompt, "messages": [], "tools": None}
    tools = None if body.tool_choice == "none" else body.tools or None
    return common | {
        "request_type": "chat", "prompt": "", "messages": body.messages, "tools": tools,
    }  # fmt: skip
