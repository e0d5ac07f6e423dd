"""What checkpoints save and cost: ``python -m benchmarks.checkpoints [MODEL…]``.

Caches have the head sizes, windows and states of real models; layers are few and narrow, with
random weights. Shares of bytes do not depend on that; those of time are higher than in a real
model, which computes more for a cache of the same size. A conversation of 2,000
tokens begins with a system prompt of 900; its entry in a store answers a new first question,
and an edited last turn, in another process's place: nothing is taken from memory.

Times are CPU times of one process, the least of some runs that take turns.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

import vkv
from fixtures.models.build import build
from vkv.caches.checkpoints import prefill as reading
from vkv.caches.checkpoints.record import checkpoints_of

#: Tokens of the system prompt, then of a user's and an assistant's messages in turn.
LENGTHS = (900, 60, 160, 60, 160, 60, 160, 60, 160, 60, 160, 160)
VOCAB = 256
#: Narrow models: less to compute than in real ones, so that shares of time are too high.
WIDTHS = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": VOCAB}
RUNS = 2


def gpt_oss() -> Any:
    """Return gpt-oss-20b's caches: window 128, 8 heads of 64 for keys; 2 of 24 layers."""
    config = {
        "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 8,
        "num_key_value_heads": 8, "sliding_window": 128, "num_local_experts": 2,
        "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
    }  # fmt: skip
    return build("gpt_oss", 0, mx.float32, WIDTHS | config)


def gemma3() -> Any:
    """Return gemma-3-1b's caches: window 512, 1 head of 256 for keys, in 5 of 6 layers."""
    config = {
        "num_hidden_layers": 6, "head_dim": 256, "num_attention_heads": 4,
        "num_key_value_heads": 1, "sliding_window": 512, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return build("gemma3_text", 0, mx.float32, WIDTHS | config)


def falcon_h1() -> Any:
    """Return Falcon-H1-0.5B's caches: 24 states of 64 by 128, 2 heads of 64 for keys; 2 of 36."""
    config = {
        "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 128, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0,
    }  # fmt: skip
    return build("falcon_h1", 0, mx.float32, WIDTHS | config)


def lfm2() -> Any:
    """Return LFM2's caches: 8 heads of 64 for keys, 3 tokens in 3 of 4 layers."""
    config = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 512, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 512,
        "block_ff_dim": 128, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    return build("lfm2", 0, mx.float32, WIDTHS | config)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt_oss": gpt_oss, "gemma3": gemma3, "falcon_h1": falcon_h1, "lfm2": lfm2,
}  # fmt: skip


class Template:
    """Stand for a tokenizer whose template joins the ids of messages as they are."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        """Return the ids of some messages; an empty text has none."""
        return [i for m in messages for i in (m["content"] or ())]


def conversation() -> list[dict[str, Any]]:
    """Return messages whose contents are token ids."""
    chance = random.Random(1)
    roles = ["system", *["user", "assistant"] * len(LENGTHS)]
    return [
        {"role": role, "content": [chance.randrange(1, VOCAB) for _ in range(count)]}
        for role, count in zip(roles, LENGTHS, strict=False)
    ]


def prefill(model: Any, ids: list[int], messages: list[dict[str, Any]] | None) -> vkv.Prompt:
    """Compute the conversation, with checkpoints at the ends of messages if they are given."""
    if messages is None:
        return vkv.prefill(model, ids)
    options = {"messages": messages, "tokenizer": Template()}
    return vkv.prefill(model, ids, checkpoints="messages", **options)


@contextmanager
def taking() -> Iterator[list[float]]:
    """Yield the CPU seconds that each checkpoint of the block took."""
    seconds: list[float] = []
    take = reading.take

    def measured(*args: Any, **options: Any) -> Any:
        spent, taken = timed(lambda: take(*args, **options))
        seconds.append(spent)
        return taken

    reading.take = measured
    try:
        yield seconds
    finally:
        reading.take = take


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds of CPU time, all threads, and the result of a call."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(name: str, root: Path) -> str:
    """Return a row of the table for one model."""
    model, messages = MODELS[name](), conversation()
    ids = Template().apply_chat_template(messages)
    marks = (None, messages)
    read: dict[bool, list[float]] = {False: [], True: []}
    write: dict[bool, list[float]] = {False: [], True: []}
    taken: dict[bool, list[float]] = {False: [], True: []}
    sizes = {}
    prompt = prefill(model, ids[:600], None)  # compiles kernels
    for run in range(RUNS):
        for given in marks:
            key = given is not None
            with taking() as seconds_taken:
                seconds, prompt = timed(lambda given=given: prefill(model, ids, given))
            read[key].append(seconds - sum(seconds_taken))
            taken[key].append(sum(seconds_taken))
            store = vkv.PromptStore(root / f"{name}-{run}-{key}")
            seconds, entry = timed(
                lambda store=store, prompt=prompt: store.put(prompt.cache, ids, model=model)
            )
            write[key].append(seconds)
            sizes[key] = entry.size
    points = [c.tokens for c in checkpoints_of(prompt.cache)]
    system, last = LENGTHS[0], sum(LENGTHS[:-1])
    other = [7] * 60
    first = store.get([*ids[:system], *other], model=model)
    edited = store.get([*ids[:last], *other], model=model)
    base = min(read[False])
    spent = min(taken[True])
    extra = spent + min(write[True]) - min(write[False])
    return (
        f"{name:<11} {first.tokens / system:8.1%} {edited.tokens / last:8.1%} "
        f"{sizes[True] / sizes[False]:6.2f}  {spent / base:7.1%} {extra / base:8.1%}  "
        f"{base:6.1f} s  {points}"
    )


def main() -> None:
    print("model       question     edit   disk   taking +writing  prefill  checkpoints after")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            print(measure(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
