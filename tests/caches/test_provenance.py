"""A cache that came from a lossy file, grew and is saved again loses nothing."""

from __future__ import annotations

import copy
import pickle

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache

import vkv
from tests.helpers.descriptors import open_files
from vkv.format.document import open_document
from vkv.format.layers import walk


def grow(cache, tokens: int, seed: int) -> None:
    keys = mx.random.normal((1, 2, tokens, 64), key=mx.random.key(seed)).astype(mx.float16)
    values = mx.random.normal((1, 2, tokens, 64), key=mx.random.key(seed + 1)).astype(mx.float16)
    cache.update_and_fetch(keys, values)


def first_segment(path, layer: int = 0) -> dict[str, str]:
    """Digest of each part of the first segment of keys and values."""
    with open_document(path) as document:
        _, stored = walk(document.header.layers)[layer]
        return {
            f"{name}.{part}": document.header.tensors[where].digest.hex()
            for name, tensor in stored.tensors.items()
            for part, where in tensor.segments[0].parts.items()
        }


def describe(path) -> list[str]:
    info = vkv.inspect(path)
    return [t for row in info.to_dict()["layers"] for t in row["tensors"].values()]


def test_ten_rounds_leave_the_first_prompt_bit_identical(tmp_path):
    cache = KVCache()
    grow(cache, 96, 0)
    vkv.save(tmp_path / "0.vkv", [cache], tokens=range(96), codec="affine:bits=4")
    first = first_segment(tmp_path / "0.vkv")
    for i in range(1, 11):
        prompt = vkv.load(tmp_path / f"{i - 1}.vkv")
        grow(prompt.cache[0], 20, 10 * i)
        tokens = range(96 + 20 * i)
        vkv.save(tmp_path / f"{i}.vkv", prompt.cache, tokens=tokens, codec="affine:bits=4")
        assert first_segment(tmp_path / f"{i}.vkv") == first
    assert vkv.load(tmp_path / "10.vkv").cache[0].offset == 296


def test_forty_rounds_stay_in_few_segments(tmp_path):
    path = tmp_path / "a.vkv"
    cache = KVCache()
    grow(cache, 8, 0)
    vkv.save(path, [cache], codec="affine:bits=4")
    start = vkv.load(path).cache[0].keys
    for i in range(40):
        prompt = vkv.load(path)
        grow(prompt.cache[0], 1, i)
        info = vkv.save(path, prompt.cache, codec="affine:bits=4")
    tensor = info.header.layers[0].tensors["keys"]
    assert len(tensor.segments) <= 18
    assert mx.array_equal(vkv.load(path).cache[0].keys[..., :8, :], start)


def test_trimmed_and_grown_with_other_tokens_is_encoded_anew(tmp_path):
    cache = KVCache()
    grow(cache, 50, 0)
    vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    live = vkv.load(tmp_path / "a.vkv").cache
    live[0].trim(20)
    grow(live[0], 30, 7)
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=8")
    assert describe(tmp_path / "b.vkv")[0].endswith(
        "affine:bits=4,group=64,scale=F16 30 + affine:bits=8,group=64,scale=F16 30"
    )
    kept = vkv.load(tmp_path / "b.vkv").cache[0].keys[..., :30, :]
    assert mx.array_equal(kept, live[0].keys[..., :30, :])


def test_trimmed_keeps_the_prefix_of_a_segment(tmp_path):
    cache = KVCache()
    grow(cache, 50, 0)
    vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    live = vkv.load(tmp_path / "a.vkv").cache
    live[0].trim(20)
    vkv.save(tmp_path / "b.vkv", live, codec="raw")
    assert "affine" in describe(tmp_path / "b.vkv")[0]
    assert mx.array_equal(vkv.load(tmp_path / "b.vkv").cache[0].keys, live[0].keys[..., :30, :])


@pytest.mark.parametrize("wrap", [copy.copy, copy.deepcopy])
def test_copies_remember_too(tmp_path, wrap):
    cache = KVCache()
    grow(cache, 50, 0)
    vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=2")
    live = wrap(vkv.load(tmp_path / "a.vkv").cache)
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=2")
    assert first_segment(tmp_path / "b.vkv") == first_segment(tmp_path / "a.vkv")


def test_children_of_a_list_remember(tmp_path):
    cache = CacheList(KVCache(), KVCache())
    for i, child in enumerate(cache.caches):
        grow(child, 40, i)
    vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    live = vkv.load(tmp_path / "a.vkv").cache
    for child in live[0].caches:
        grow(child, 9, 5)
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=4")
    assert first_segment(tmp_path / "b.vkv", 1) == first_segment(tmp_path / "a.vkv", 1)


def test_saving_over_the_file_it_came_from(tmp_path):
    path = tmp_path / "a.vkv"
    cache = KVCache()
    grow(cache, 40, 0)
    vkv.save(path, [cache], codec="affine:bits=4")
    first = first_segment(path)
    live = vkv.load(path).cache
    grow(live[0], 4, 3)
    vkv.save(path, live, codec="affine:bits=4")
    assert first_segment(path) == first


def test_reencode_forgets(tmp_path):
    cache = KVCache()
    grow(cache, 40, 0)
    vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    live = vkv.load(tmp_path / "a.vkv").cache
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=8", reencode=True)
    assert all("bits=8" in text and "bits=4" not in text for text in describe(tmp_path / "b.vkv"))


def lossy(path, codec="affine:bits=2"):
    """Write a small lossy file and return its caches, loaded."""
    cache = KVCache()
    grow(cache, 50, 0)
    vkv.save(path, [cache], tokens=range(50), codec=codec)
    return vkv.load(path).cache


def test_a_loaded_prompt_keeps_no_file_open(tmp_path):
    before = open_files()
    prompts = []
    for live in ("dense", "packed"):
        lossy(tmp_path / "a.vkv")
        prompts.append(vkv.load(tmp_path / "a.vkv", live=live))
    assert open_files() == before
    vkv.save(tmp_path / "b.vkv", prompts[0].cache, codec="affine:bits=2")
    assert open_files() == before


def test_a_pickle_remembers(tmp_path):
    live = pickle.loads(pickle.dumps(lossy(tmp_path / "a.vkv")))
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=2")
    assert first_segment(tmp_path / "b.vkv") == first_segment(tmp_path / "a.vkv")


def test_it_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    live = lossy("a.vkv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    vkv.save("b.vkv", live, codec="affine:bits=2")
    assert first_segment("b.vkv") == first_segment(tmp_path / "a.vkv")


def test_a_file_that_was_renamed_is_found_by_its_id(tmp_path):
    live = lossy(tmp_path / "a.vkv")
    (tmp_path / "a.vkv").rename(tmp_path / "c.vkv")
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=2")
    assert first_segment(tmp_path / "b.vkv") == first_segment(tmp_path / "c.vkv")


def test_a_file_that_is_gone_is_said(tmp_path):
    live = lossy(tmp_path / "a.vkv")
    keys = live[0].keys
    (tmp_path / "a.vkv").unlink()
    with pytest.warns(
        UserWarning, match=r"a\.vkv, which the caches were loaded from, cannot be re"
    ):
        info = vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=8")
    assert describe(info.path)[0].endswith("affine:bits=8,group=64,scale=F16")
    error = mx.abs(vkv.load(info.path).cache[0].keys - keys).max()
    assert 0 < error < 0.05
    vkv.save(tmp_path / "b.vkv", live, codec="affine:bits=8", reencode=True)  # no warning


def test_another_file_in_its_place_does_no_harm(tmp_path):
    live = lossy(tmp_path / "a.vkv")
    other = KVCache()
    grow(other, 50, 9)
    vkv.save(tmp_path / "a.vkv", [other], codec="affine:bits=2")
    vkv.save(tmp_path / "b.vkv", live, codec="raw")
    assert mx.array_equal(vkv.load(tmp_path / "b.vkv").cache[0].keys, live[0].keys)


def test_a_damaged_file_is_said_and_costs_nothing(tmp_path):
    live = lossy(tmp_path / "a.vkv")
    data = bytearray((tmp_path / "a.vkv").read_bytes())
    with open_document(tmp_path / "a.vkv") as document:
        at = document.entries["layers.0.keys.0.codes"].start
    data[at] ^= 1
    (tmp_path / "a.vkv").write_bytes(data)
    with pytest.warns(UserWarning, match=r"codes of .*a\.vkv cannot be kept"):
        vkv.save(tmp_path / "b.vkv", live, codec="raw")
    assert mx.array_equal(vkv.load(tmp_path / "b.vkv").cache[0].keys, live[0].keys)


def test_a_conversation_saved_over_its_file_keeps_all_codes(tmp_path):
    path = tmp_path / "a.vkv"
    live = lossy(path)
    first = first_segment(path)
    for turn in range(4):
        grow(live[0], 10, turn)
        vkv.save(path, live, codec="affine:bits=2")
        assert first_segment(path) == first
        segments = vkv.inspect(path).header.layers[0].tensors["keys"].segments
        assert [s.tokens for s in segments] == [50, 10 * (turn + 1)]
