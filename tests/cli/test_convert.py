"""``vkv convert``: prompt caches of mlx-lm, and files in other codecs."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import vkv


@pytest.fixture(scope="module")
def prompt_cache(model, tmp_path_factory):
    """What ``mlx_lm.cache_prompt --prompt Hello`` writes."""
    path = tmp_path_factory.mktemp("mlx-lm") / "old.safetensors"
    loaded, tokenizer = mlx_lm.load(str(model))
    cache, tokens = make_prompt_cache(loaded), tokenizer.encode("<|im_start|>user\nHello")
    loaded(mx.array([tokens]), cache=cache)
    save_prompt_cache(str(path), cache, {"model": "some/model", "tokenizer_config": "{}"})
    return path


def test_a_prompt_cache_with_its_prompt_resumes(run, model, prompt_cache, saved, tmp_path):
    path = tmp_path / "new.vkv"
    ran = run("convert", prompt_cache, path, "--model", model, "--prompt", "Hello")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"{path}: 11 tokens, ")
    assert vkv.inspect(path).metadata["model"] == str(model)
    args = ["--model", model, "-p", " you", "-m", 8, "--json"]
    assert (
        run("generate", path, *args).json["tokens"] == run("generate", saved, *args).json["tokens"]
    )


def test_a_prompt_cache_alone(run, prompt_cache, tmp_path):
    path = tmp_path / "new.vkv"
    ran = run("convert", prompt_cache, path, "--meta", "by=me", "--json")
    assert ran.json == vkv.inspect(path).to_dict()
    assert ran.json["metadata"] == {"model": "some/model", "tokenizer_config": "{}", "by": "me"}
    assert (ran.json["tokens"], ran.json["model"]) == (None, None)


def test_the_wrong_prompt_is_refused(run, model, prompt_cache, tmp_path):
    path = tmp_path / "new.vkv"
    ran = run("convert", prompt_cache, path, "--model", model, "--prompt", "Hell")
    assert ran.status == 1
    assert ran.err.endswith("[L6]\n")
    assert not path.exists()


def test_another_codec(run, saved, tmp_path):
    path = tmp_path / "new.vkv"
    assert run("convert", saved, path, "--codec", "affine:bits=4,group=32").status == 0
    old, new = vkv.inspect(saved), vkv.inspect(path)
    assert new.codecs["keys"].startswith("affine:bits=4,group=32")
    assert (new.tokens, new.metadata) == (old.tokens, old.metadata)


def test_what_is_neither(run, tmp_path):
    (tmp_path / "a.txt").write_text("hello, hello, hello")
    ran = run("convert", tmp_path / "a.txt", tmp_path / "b.vkv")
    assert ran.status == 1
    assert ran.err.startswith(f"vkv: error: {tmp_path / 'a.txt'}")
    assert ran.err.count("\n") == 1
