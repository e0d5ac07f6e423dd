"""Arguments of a wrong type are refused by name, with what was expected; nothing is written."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import vkv
from fixtures.models import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture
def cache(model: Any) -> list[Any]:
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    return cache


@pytest.fixture
def saved(cache, model, tmp_path):
    vkv.save(tmp_path / "saved.vkv", cache, tokens=[1, 2, 3], model=model)
    return tmp_path / "saved.vkv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": 4}, "codec: 4, expected a codec string, or a map"),
        ({"codec": {"keys": 4}}, "codec: {'keys': 4}, expected a codec string"),
        ({"codec": {"kees": "raw"}}, "'kees'"),
        ({"tokens": "text"}, "tokens: text, expected token ids: call tokenizer.encode first"),
        ({"tokens": 3}, r"tokens: token ids of shape \(\), expected"),
        ({"tokens": [["a"]]}, "tokens: token ids of type"),
        ({"metadata": ["a"]}, "metadata: a list, expected a mapping of text to text"),
        ({"metadata": "a"}, "metadata: a str, expected a mapping"),
        ({"created": 3}, "Expected `str | null`, got `int`"),
        ({"model": "name"}, "model is a str, expected a model as mlx_lm.load gives it"),
        ({"tokenizer": "name"}, "tokenizer: a str, expected a tokenizer"),
        ({"parent": 3}, "path is a int, expected str or os.PathLike"),
    ],
)
def test_save(cache, tmp_path, options, message):
    with pytest.raises(vkv.VkvError, match=message):
        vkv.save(tmp_path / "a.vkv", cache, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cache", "message"),
    [(KVCache(), "cache: a KVCache, expected a list"), (None, "cache: a NoneType, expected a list"),
     ("abc", "cache: a str, expected a list"), ([], "cache: an empty list, expected one cache")],
)  # fmt: skip
def test_what_is_no_list_of_caches(tmp_path, cache, message):
    with pytest.raises(vkv.CacheError, match=message):
        vkv.save(tmp_path / "a.vkv", cache)


def test_a_prompt_is_saved_with_its_tokens(saved, model, tmp_path):
    prompt = vkv.load(saved, model=model)
    again = vkv.save(tmp_path / "again.vkv", prompt, model=model)
    assert (tmp_path / "again.vkv").read_bytes() == saved.read_bytes()
    assert again.tokens == 3


@pytest.mark.parametrize("url", ["s3://bucket/a.vkv", "https://host/a.vkv"])
def test_urls_are_not_written_to(cache, saved, url):
    for act in (lambda: vkv.save(url, cache), lambda: vkv.convert(saved, url)):
        with pytest.raises(vkv.VkvError, match=r"is a URL .*, expected a local path"):
            act()


@pytest.mark.parametrize("read", [vkv.load, vkv.inspect, vkv.validate])
def test_a_number_is_no_path(read):
    with pytest.raises(vkv.VkvError, match=r"path is a int, expected str or os\.PathLike"):
        read(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "name"}, "model is a str, expected a model"),
        ({"tokenizer": "name"}, "tokenizer: a str, expected a tokenizer"),
        ({"live": "pakced"}, "live='pakced', expected one of"),
        ({"search_paths": 3}, "search_paths is a int, expected files and folders"),
    ],
)
def test_load(saved, options, message):
    with pytest.raises(vkv.VkvError, match=message):
        vkv.load(saved, **options)


def test_one_search_path_need_not_stand_in_a_list(cache, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    vkv.save(tmp_path / "a" / "0.vkv", cache, tokens=[1, 2, 3])
    vkv.save(tmp_path / "b" / "1.vkv", cache, tokens=[1, 2, 3], parent=tmp_path / "a" / "0.vkv")
    assert vkv.load(tmp_path / "b" / "1.vkv", search_paths=tmp_path / "a").tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [(("name", "raw"), "model is a str, expected a model"),
     ((None, 4), "codec: 4, expected a codec string")],
)  # fmt: skip
def test_make_prompt_cache(args, message):
    with pytest.raises(vkv.VkvError, match=message):
        vkv.make_prompt_cache(*args)


@pytest.mark.parametrize(("other", "kind"), [(None, "None"), ("name", "a str"), (3, "a int")])
def test_all_that_take_a_model_refuse_another_object_alike(cache, tmp_path, other, kind):
    message = f"^model is {kind}, expected a model as mlx_lm.load gives it$"
    with pytest.raises(vkv.VkvError, match=message):
        vkv.make_prompt_cache(other, "raw")
    with pytest.raises(vkv.VkvError, match=message):
        vkv.prefill(other, [1, 2, 3])
    if other is not None:  # a save without a model is allowed
        with pytest.raises(vkv.VkvError, match=message):
            vkv.save(tmp_path / "a.vkv", cache, model=other)
