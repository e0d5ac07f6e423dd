"""What ``vkv.diff`` finds, and how it is told in few lines."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import vkv
from fixtures.models import tiny
from tests.helpers.descriptors import open_files
from vkv.tools.diff import Diff, Difference


def filled(cache, seed=0, tokens=8, dim=64):
    x = mx.random.normal((1, 2, tokens, dim), mx.float16, key=mx.random.key(seed))
    cache.update_and_fetch(x, x)
    return cache


@pytest.fixture
def differing(tmp_path):
    """Save two caches and return what differs, as a map from place to both sides."""

    def act(a, b, *, deep=False, **options):
        vkv.save(tmp_path / "a.vkv", a, **options.get("first", {}))
        vkv.save(tmp_path / "b.vkv", b, **options.get("second", {}))
        found = vkv.diff(tmp_path / "a.vkv", tmp_path / "b.vkv", deep=deep)
        return {d.at: (d.a, d.b) for d in found.differences}

    return act


def test_equal_caches_do_not_differ(differing):
    assert differing([filled(KVCache())], [filled(KVCache())], deep=True) == {}


def test_codecs_and_values(differing):
    cache = [filled(KVCache())]
    found = differing(cache, cache, deep=True, second={"codec": "affine:bits=4"})
    assert found["layers[0].keys"] == (
        "F16 (1, 2, 8, 64): raw",
        "F16 (1, 2, 8, 64): affine:bits=4,group=64,scale=F16",
    )
    assert found["layers[0].keys.values"][1].startswith("largest difference 0.")


def test_other_values_in_the_same_form(differing):
    found = differing([filled(KVCache())], [filled(KVCache(), seed=1)])
    assert found.keys() == {"layers[0].keys.digests", "layers[0].values.digests"}


def test_tokens_and_metadata(differing):
    cache = [filled(KVCache(), tokens=3)]
    first = {"tokens": [1, 2, 3], "metadata": {"by": "me", "x": "1"}}
    second = {"tokens": [1, 5, 3], "metadata": {"by": "you"}}
    assert differing(cache, cache, first=first, second=second) == {
        "tokens[1]": ("2", "5"),
        "metadata.by": ("me", "you"),
        "metadata.x": ("1", "—"),
    }


def test_kinds_and_missing_layers(differing):
    two = [filled(KVCache()), filled(KVCache())]
    found = differing([filled(RotatingKVCache(8))], two)
    assert found["layers[0].kind"] == ("rotating", "kv")
    assert found["layers[0].max_size"] == ("8", "—")
    assert found["layers[1].kind"] == ("—", "kv")


@pytest.mark.parametrize(
    ("places", "rows"),
    [
        (["layers[0].keys"], ["layers[0].keys"]),
        (["layers[0].keys", "layers[1].keys", "layers[2].keys"], ["layers[0-2].keys"]),
        (
            ["layers[0].keys", "layers[0].values", "layers[1].keys", "layers[1].values"],
            ["layers[0-1].keys", "layers[0-1].values"],
        ),
        (["layers[0].keys", "layers[2].keys"], ["layers[0].keys", "layers[2].keys"]),
        (
            ["created", "layers[9].children[0].keys", "layers[10].children[0].keys"],
            ["created", "layers[9-10].children[0].keys"],
        ),
        (
            ["metadata.layers[0]", "metadata.layers[1]"],
            ["metadata.layers[0]", "metadata.layers[1]"],
        ),
    ],
)
def test_runs_of_layers_share_a_row(places, rows):
    found = Diff("a", "b", [Difference(at, "x", "y") for at in places])
    assert [d.at for d in found.rows()] == rows


def test_layers_that_differ_otherwise_keep_their_rows():
    found = Diff("a", "b", [Difference(f"layers[{i}].keys", str(i), "y") for i in range(3)])
    assert found.rows() == found.differences


def test_two_prefills_of_one_prompt_are_told_in_few_lines(tmp_path):
    """Bytes that differ in every layer make one line for keys, and one for values."""
    for name, seed, tokens in (("a", 0, range(8)), ("b", 1, [*range(5), 9, 9])):
        caches = [filled(KVCache(), seed=seed, tokens=len(tokens)) for _ in range(12)]
        vkv.save(tmp_path / f"{name}.vkv", caches, tokens=tokens)
    vkv.save(tmp_path / "c.vkv", [filled(KVCache(), 2) for _ in range(12)], tokens=range(8))
    same = vkv.diff(tmp_path / "a.vkv", tmp_path / "c.vkv")
    assert same.rows() == [
        Difference(f"layers[0-11].{name}", "stored bytes", "other bytes")
        for name in ("keys", "values")
    ]
    assert same.summary == "models not recorded; same 8 tokens; 12 of 12 layers differ"
    other = vkv.diff(tmp_path / "a.vkv", tmp_path / "b.vkv")
    assert other.summary == (
        "models not recorded; the first 5 of 8 and 7 tokens are the same; 12 of 12 layers differ"
    )
    assert other.to_dict()["summary"] == {
        "same_model": None,
        "tokens": [8, 7],
        "tokens_in_common": 5,
        "layers": 12,
        "layers_that_differ": 12,
    }
    vkv.save(tmp_path / "d.vkv", [KVCache()])
    assert "token ids not recorded" in vkv.diff(tmp_path / "a.vkv", tmp_path / "d.vkv").summary


def test_the_summary_says_whether_the_model_is_the_same(tmp_path):
    for i in (0, 1):
        model = tiny.llama(seed=i)
        vkv.save(tmp_path / f"{i}.vkv", make_prompt_cache(model), model=model)
    files = tmp_path / "0.vkv", tmp_path / "1.vkv"
    assert vkv.diff(*files).summary.startswith("other models; ")
    assert vkv.diff(files[0], files[0]).summary.startswith("same model; ")


@pytest.mark.parametrize("tokens", [96, 99, 2 * 4096])
def test_a_file_and_the_conversation_that_grew_from_it(tmp_path, tokens):
    for name, count in (("a", 96), ("b", tokens)):
        vkv.save(tmp_path / f"{name}.vkv", [filled(KVCache(), tokens=count)], tokens=range(count))
    for first, second in ("ab", "ba"):
        found = vkv.diff(tmp_path / f"{first}.vkv", tmp_path / f"{second}.vkv")
        assert found.common == 96
        assert not any(d.at.startswith("tokens[") for d in found.differences)


def test_deep_closes_every_file_it_opened(tmp_path):
    path = tmp_path / "a.vkv"
    vkv.save(path, [filled(KVCache())], tokens=range(8))
    vkv.save(tmp_path / "b.vkv", [filled(KVCache(), tokens=12)], tokens=range(12), parent=path)
    before = open_files()
    vkv.diff(path, tmp_path / "b.vkv", deep=True)
    assert open_files() == before
