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
    assert ran.err.endswith("[L6]; run `vkv explain L6`\n")
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


def test_many_into_a_folder(run, saved, prompt_cache, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "bad.safetensors").write_text("hello, hello, hello")
    bad = tmp_path / "bad.safetensors"
    ran = run("convert", prompt_cache, bad, saved, tmp_path / "out")
    assert ran.status == 1
    assert ran.err.startswith(f"vkv: error: {bad}")
    names = {f"{prompt_cache.stem}.vkv", "saved.vkv"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert vkv.inspect(tmp_path / "out" / "saved.vkv").id == vkv.inspect(saved).id


def test_many_that_would_replace_each_other_are_refused(run, saved, tmp_path):
    (tmp_path / "saved.vkv").write_bytes(saved.read_bytes())
    before = (tmp_path / "saved.vkv").read_bytes()
    (tmp_path / "out").mkdir()
    for args, words in (
        ([saved, tmp_path / "saved.vkv", tmp_path / "out"], "several files would become"),
        ([tmp_path / "saved.vkv", tmp_path], "is one of the files to convert"),
        ([saved, saved, tmp_path / "out.vkv"], "several files need a folder"),
        ([saved, tmp_path / "b", tmp_path / "out", "-p", "x", "--model", "m"], "of one file"),
    ):
        ran = run("convert", *args)
        assert ran.status == 2
        assert words in ran.err
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "saved.vkv").read_bytes() == before
