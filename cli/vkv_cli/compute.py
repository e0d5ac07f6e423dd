"""Compute with the model: a prompt's cache, and an answer, streamed and timed."""

from __future__ import annotations

import collections
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

import vkv
from vkv.errors import VkvError
from vkv_cli.checkpoint_options import CheckpointChoice
from vkv_cli.progress import progress


def step_size(asked: int | None) -> int:
    """Return how many prompt tokens are computed at a time.

    Between steps Ctrl-C is noticed and progress is shown.
    """
    import mlx.core as mx

    return asked or (256 if mx.default_device() == mx.Device(mx.cpu) else 2048)


def prefill(
    model: Any,
    tokens: list[int],
    *,
    marks: CheckpointChoice | None = None,
    messages: list[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    max_kv_size: int | None = None,
    prefill_step_size: int | None = None,
    **options: Any,
) -> list[Any]:
    """Compute the cache of ``tokens``, as ``mlx_lm.cache_prompt`` does.

    Caches that cannot be cut get checkpoints.

    Args:
        model: The model.
        tokens: The prompt.
        marks: Where checkpoints are taken, if there are any; by default at the ends of
            ``messages``.
        messages: The conversation that ``tokens`` encode; ``None`` if there is none.
        tokenizer: Its tokenizer.
        max_kv_size: Keep only so many last tokens.
        prefill_step_size: As ``step_size`` takes it.
        options: Passed on to ``mlx_lm.generate.generate_step``.

    Raises:
        VkvError: There is nothing to compute, or the cache cannot be quantized.
    """
    from mlx_lm.models.cache import make_prompt_cache

    from vkv.caches.checkpoints.record import lets_go

    if not tokens:
        raise VkvError("an empty prompt: there is nothing to compute")
    if max_kv_size is not None and hasattr(model, "make_cache"):
        warnings.warn("this model makes its own caches: --max-kv-size has no effect", stacklevel=2)
    cache: list[Any] = make_prompt_cache(model, max_kv_size)
    marks = marks or CheckpointChoice("none", None, None)
    points = marks.points(None if messages is None else "messages")
    if marks.given and not lets_go(cache):
        warnings.warn("this model's cache can be cut anywhere: no checkpoints", stacklevel=2)
    if points is None or not lets_go(cache):
        return _without_checkpoints(model, tokens, cache, step_size(prefill_step_size), options)
    if options.get("kv_bits") is not None:
        if marks.given:
            raise click.UsageError("--kv-bits does not go with checkpoints.")
        return _without_checkpoints(model, tokens, cache, step_size(prefill_step_size), options)
    with progress("computing the prompt", unit="tokens") as step:
        return vkv.prefill(
            model, tokens, checkpoints=points, messages=messages, tokenizer=tokenizer,
            checkpoint_share=marks.checkpoint_share, cache=cache, progress=step,
            step=step_size(prefill_step_size),
        ).cache  # fmt: skip


def _without_checkpoints(
    model: Any, tokens: list[int], cache: list[Any], size: int, options: dict[str, Any]
) -> list[Any]:
    """Fill ``cache`` by mlx-lm's own prefill, in steps of ``size`` tokens, and return it."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    with progress("computing the prompt", unit="tokens") as step:
        steps = generate_step(
            mx.array(tokens), model, max_tokens=0, prompt_cache=cache,
            prompt_progress_callback=step, prefill_step_size=size, **options,
        )  # fmt: skip
        try:
            collections.deque(steps, maxlen=0)
        except (NotImplementedError, ValueError) as exc:
            if options.get("kv_bits") is None:
                raise
            raise VkvError(f"--kv-bits {options['kv_bits']}: {exc}") from exc
    return cache


@dataclass(frozen=True, slots=True)
class Sampling:
    """Say how tokens are chosen, and how many.

    Attributes:
        max_tokens: At most so many; -1 for no limit.
        temp: 0 takes the most likely one.
        top_p: Sample from the smallest set whose probabilities add up to this.
        seed: For the random numbers.
        prefill_step_size: As ``step_size`` takes it.
    """

    max_tokens: int
    temp: float
    top_p: float
    seed: int | None
    prefill_step_size: int | None = None


@dataclass(slots=True)
class Answer:
    """Hold what was generated, from how much, and how fast.

    Attributes:
        reused: Prompt tokens taken from the file.
        computed: Prompt tokens computed.
        seconds: From the call to the first token, the prompt's computation included.
        rate: Tokens per second after the first.
        finish: ``"stop"`` or ``"length"``.
    """

    reused: int
    computed: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    rate: float = 0.0
    finish: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema_version": 1,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish,
            "prompt_tokens": {"reused": self.reused, "computed": self.computed},
            "seconds_to_first_token": self.seconds,
            "tokens_per_second": self.rate,
        }


def answer(
    cache: list[Any],
    rest: list[int],
    model: Any,
    tokenizer: Any,
    sampling: Sampling,
    reused: int,
    *,
    echo: bool,
) -> Answer:
    """Compute ``rest`` on top of ``cache`` and generate; the cache grows in place.

    Every token of the answer is in the cache afterwards, also the last: mlx-lm
    begins the next step before it hands a token out.

    Args:
        cache: Holds ``reused`` tokens.
        rest: Prompt tokens that follow; at least one.
        echo: Print the text as it comes.
    """
    found = Answer(reused, len(rest))
    start = time.perf_counter()
    responses = _stream(rest, model, tokenizer, cache, sampling)
    for response in responses:
        if not found.tokens:
            found.seconds = time.perf_counter() - start
        found.tokens.append(response.token)
        found.text += response.text
        if echo and response.text:
            echo = _said(response.text)
    spent = time.perf_counter() - start - found.seconds
    found.rate = (len(found.tokens) - 1) / spent if spent > 0 else 0.0
    found.finish = response.finish_reason
    if echo:
        _said("\n")
    return found


def _said(words: str) -> bool:
    """Print a piece of the answer; return False if the reader is gone.

    The answer is computed, and saved, all the same.
    """
    try:
        click.echo(words, nl=False)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is buffered has no reader
        return False
    return True


def _stream(
    rest: list[int], model: Any, tokenizer: Any, cache: list[Any], sampling: Sampling
) -> Iterator[Any]:
    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    if sampling.seed is not None:
        mx.random.seed(sampling.seed)
    with progress("computing the prompt", unit="tokens") as step:
        responses = stream_generate(
            model, tokenizer, rest, max_tokens=sampling.max_tokens, prompt_cache=cache,
            sampler=make_sampler(sampling.temp, sampling.top_p), prompt_progress_callback=step,
            prefill_step_size=step_size(sampling.prefill_step_size),
        )  # fmt: skip
        first = next(responses)
    yield first
    yield from responses
