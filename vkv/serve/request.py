"""Describe what a request may say: every parameter with its type and range."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

#: The largest 32-bit integer: where mlx-lm and MLX put a number that is larger, it wraps.
LARGEST = 2**31 - 1

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
#: OpenAI allows -2 to 2; larger ones are of use with small models.
Penalty: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
StopWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Bias: TypeAlias = Annotated[float, Meta(ge=-10_000, le=10_000)]
#: mlx-lm multiplies logits by its inverse, in the dtype of the model.
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Repetition: TypeAlias = Annotated[float, Meta(ge=0, le=100)]

#: Options of the OpenAI API that this server lacks, each with the values that ask for
#: nothing. Any other value but null is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "draft_model": ("default_model",),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "num_draft_tokens": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "role_mapping": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Hold the options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect on the text


class Common(Struct, kw_only=True, forbid_unknown_fields=True):
    """Hold the parameters of both kinds of completions; null is the same as absent."""

    model: str | None = None
    adapters: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Size | None = None
    max_completion_tokens: Size | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Count | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=4096)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1, le=11)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: StopWord | Annotated[list[StopWord], Meta(max_length=16)] | None = None

    # Without effect on the answer.
    metadata: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None

    # See NEUTRAL.
    draft_model: Any = None
    n: Any = None
    num_draft_tokens: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None


class ChatRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Hold the parameters of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    role_mapping: Any = None
    tool_choice: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TextRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Hold the parameters of ``/v1/completions``."""

    prompt: Text | Annotated[list[Text], Meta(min_length=1, max_length=1)]

    best_of: Any = None
    echo: Any = None
    suffix: Any = None
