"""The main job on SmolLM2: saved, loaded, and continued token for token."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm import load as load_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from vkv_cli.commands.inspect import inspect
from vkv_cli.demo_text import SYSTEM_PROMPT
from vkv_cli.group import Run

import vkv
from vkv.bench.quality import compare, log_probs
from vkv.caches import chat
from vkv.demo.model import smollm2

pytestmark = pytest.mark.model

TEXT = Path(__file__).parents[1] / "fixtures" / "text" / "prose.txt"
CONTEXT, TEST, NEW = 192, 48, 12


@pytest.fixture(scope="module")
def real():
    return load_model(str(smollm2()))[:2]


@pytest.fixture(scope="module")
def ids(real):
    return real[1].encode(TEXT.read_text()[:4000])[: CONTEXT + TEST]


@pytest.fixture(scope="module")
def cache(real, ids):
    model, _ = real
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:CONTEXT]]), cache=cache))
    return cache


def greedy(model, cache, token: int) -> list[int]:
    steps = generate_step(mx.array([token]), model, max_tokens=NEW, prompt_cache=cache)
    return [int(t) for t, _ in steps]


@pytest.fixture(scope="module")
def files(real, ids, cache, tmp_path_factory):
    """Written before anything grows the cache."""
    model, tokenizer = real
    folder = tmp_path_factory.mktemp("real")
    for name, codec in {
        "raw": "raw",
        "affine4": "affine:bits=4",
        "affine8": "affine:bits=8",
    }.items():
        vkv.save(
            folder / f"{name}.vkv", cache, tokens=ids[:CONTEXT], model=model, tokenizer=tokenizer,
            codec=codec,
        )  # fmt: skip
    return folder


def test_greedy_continuation_from_raw_equals_the_uninterrupted_one(real, ids, cache, files):
    model, tokenizer = real
    prompt = vkv.load(files / "raw.vkv", model=model, tokenizer=tokenizer)
    never_saved = vkv.load(files / "raw.vkv").cache
    for kept, live in zip(never_saved, cache, strict=True):
        assert mx.array_equal(kept.keys, live.keys[..., :CONTEXT, :])
        assert mx.array_equal(kept.values, live.values[..., :CONTEXT, :])
    rest = prompt.resume(ids[: CONTEXT + 1])
    assert rest == [ids[CONTEXT]]
    assert greedy(model, prompt.cache, rest[0]) == greedy(model, cache, ids[CONTEXT])


def test_quality_falls_in_order(real, ids, files):
    model, _ = real
    test = ids[CONTEXT:]
    raw, four, eight = (
        log_probs(model, vkv.load(files / f"{n}.vkv").cache, test)
        for n in ("raw", "affine4", "affine8")
    )
    loss4, loss8 = compare(raw, four, test), compare(raw, eight, test)
    assert loss8.kl < 0.001 < loss4.kl < 0.06
    assert loss8.top1 >= 0.95


def test_an_equal_prompt_computes_its_last_token_again(real, ids, files):
    model, _ = real
    prompt = vkv.load(files / "raw.vkv", model=model)
    assert prompt.resume(ids[:CONTEXT]) == [ids[CONTEXT - 1]]
    assert {c.offset for c in prompt.cache} == {CONTEXT - 1}


def test_identity_takes_milliseconds_and_no_weight_file(real):
    from vkv import identity

    model, _ = real
    first, _ = identity.of_model(model)
    again, _ = identity.of_model(model)
    assert first == again
    assert first.parameters == 134_515_008
    assert len(first.layers) == 30


def test_the_first_output_of_the_readme(real, tmp_path, monkeypatch):
    """All lines but the id: low bits of values differ between processors."""
    model, tokenizer = real
    ids = chat.opening(tokenizer, [{"role": "system", "content": SYSTEM_PROMPT}])
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    config = '{"trust_remote_code": false}'
    metadata = {"model": "SmolLM2-135M-Instruct", "tokenizer_config": config}
    owner = {"model": model, "tokenizer": tokenizer}
    vkv.save("sys.vkv", cache, tokens=ids, codec="affine:bits=4", metadata=metadata, **owner)
    shown = CliRunner().invoke(inspect, ["sys.vkv"], obj=Run()).output.splitlines()
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    first = readme.split("$ vkv inspect sys.vkv\n")[1].split("```")[0].splitlines()
    assert [x for x in shown if "  id " not in x] == [x for x in first if "  id " not in x]
