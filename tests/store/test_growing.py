"""Conversations that grow: only what is new is written, and nothing is lost with a turn."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from tests.helpers.stores import consistent, flip
from vkv.errors import MissingFileError
from vkv.format.document import open_document

FIRST, TURN = 400, 20  # a twentieth, as 200 tokens on a conversation of 4,000
TOKENS = [(7 * i) % 251 for i in range(FIRST + 3 * TURN)]


@pytest.fixture(scope="module")
def wide():
    """A model wide enough that its keys outweigh the header."""
    return tiny.llama(kv_heads=4, head_dim=64)


@pytest.fixture(params=["raw", "affine:bits=4"])
def chat(request, wide, store):
    """A store, and the entries of four turns of one conversation in it."""
    cache = make_prompt_cache(wide)
    entries, done = [], 0
    for turn in range(4):
        count = FIRST + turn * TURN
        mx.eval(wide(mx.array([TOKENS[done:count]]), cache=cache))
        done = count
        entries.append(store.put(cache, TOKENS[:count], model=wide, codec=request.param))
    return store, entries, cache, request.param


def test_a_turn_writes_a_fraction_of_a_full_save(chat, wide, tmp_path):
    store, entries, cache, codec = chat
    whole = vkv.save(tmp_path / "whole.vkv", cache, tokens=TOKENS, model=wide, codec=codec)
    print(codec, [e.size for e in entries], whole.size)
    for turn, entry in enumerate(entries[1:], 1):
        assert set(entry.dependencies) == {e.id for e in entries[:turn]}
        assert entry.size < 0.15 * whole.size
    consistent(store)
    hit = store.get([*TOKENS, 0], model=wide)
    assert hit.tokens == len(TOKENS)
    if codec == "raw":
        assert mx.array_equal(hit.cache[0].keys, cache[0].keys[..., : len(TOKENS), :])


def test_putting_a_turn_again_writes_nothing(chat, wide):
    store, entries, cache, codec = chat
    again = store.put(cache, TOKENS, model=wide, codec=codec)
    assert again.id == entries[-1].id
    assert len(consistent(store)) == 4


def test_a_removed_turn_serves_those_that_stand_on_it(chat, wide):
    store, entries, _, _ = chat
    before = store.stats().bytes
    store.rm(entries[0].id, entries[1].id)
    stats = store.stats()
    assert (stats.entries, stats.bytes) == (2, before)
    assert stats.retained == entries[0].size + entries[1].size
    assert store.get(TOKENS[: FIRST + 5], model=wide).tokens == FIRST + 4  # trimmed
    assert store.reindex() == []
    assert consistent(store) == [entries[2].id, entries[3].id]
    store.rm(entries[2].id)
    store.rm(entries[3].id)
    assert consistent(store) == []
    assert store.stats().bytes == 0


def test_a_removed_turn_comes_back_when_it_is_put_again(chat, wide):
    store, entries, cache, codec = chat
    store.rm(entries[3].id, entries[0].id)
    store.put(cache, TOKENS, model=wide, codec=codec)
    assert len(consistent(store)) == 3


def test_eviction_takes_the_last_turn_first(chat):
    store, entries, _, _ = chat
    cap = store.stats().bytes - 1
    assert [e.id for e in store.gc(max_bytes=cap).entries] == [entries[3].id]
    assert [e.id for e in store.gc(max_age=0.0).entries] == [e.id for e in entries[2::-1]]
    assert consistent(store) == []


def test_pinning_a_turn_keeps_what_it_stands_on(chat, wide):
    store, entries, _, _ = chat
    store.pin(entries[2].id)
    store.gc(max_bytes=0)
    assert set(consistent(store)) == {e.id for e in entries[:3]}


def test_export_stands_alone_and_add_takes_it_back(chat, wide, tmp_path):
    store, entries, _, _ = chat
    store.export(entries[3].id, tmp_path / "a.vkv")
    assert vkv.inspect(tmp_path / "a.vkv").dependencies == {}
    alone = vkv.load(tmp_path / "a.vkv", model=wide).cache
    hit = store.get([*TOKENS, 0], model=wide)
    assert mx.array_equal(alone[0].keys, hit.cache[0].keys)
    assert store.add(tmp_path / "a.vkv").id == entries[3].id  # the same content


def test_add_brings_what_a_file_stands_on(chat, wide, tmp_path):
    _, entries, _, _ = chat
    other = vkv.PromptStore(tmp_path / "other")
    with pytest.raises(MissingFileError):
        other.add(entries[3].path, search_paths=[entries[1].path])
    assert other.ls() == []
    added = other.add(entries[3].path, search_paths=[e.path for e in entries])
    assert (added.id, added.dependencies) == (entries[3].id, entries[3].dependencies)
    assert consistent(other) == [added.id]
    assert other.stats().retained == sum(e.size for e in entries[:3])
    assert other.get([*TOKENS, 0], model=wide).tokens == len(TOKENS)
    assert other.reindex() == []
    other.rm(*(e.id for e in other.ls()))
    assert other.stats().bytes == 0


def test_damage_below_takes_all_that_stands_on_it(chat, wide):
    store, entries, _, _ = chat
    flip(entries[1].path)
    hit = store.get([*TOKENS, 0], model=wide)
    assert (hit.entry.id, hit.tokens) == (entries[0].id, FIRST)
    assert consistent(store) == [entries[0].id]


def test_a_lost_file_takes_all_that_stands_on_it(chat, wide):
    store, entries, _, _ = chat
    entries[1].path.unlink()
    assert {f.at for f in store.verify().findings} >= {entries[1].id}
    assert {e.id for e in store.gc().entries} == {e.id for e in entries[1:]}
    assert consistent(store) == [entries[0].id]


def test_without_its_base_a_file_is_no_entry(chat, wide):
    store, entries, _, _ = chat
    for path in (entries[0].path, *store.root.glob("index*")):
        path.unlink()
    bare = vkv.PromptStore(store.root)
    assert bare.ls() == []
    assert all(e.path.exists() for e in entries[1:])  # opening deletes nothing
    assert {p.stem for p in bare.gc().files} == {e.id for e in entries[1:]}
    assert consistent(bare) == []


def test_a_turn_is_written_whole_where_it_cannot_stand(chat, wide):
    store, entries, cache, codec = chat
    store.rm(entries[3].id)
    raw = entries[2].path.read_bytes()
    entries[2].path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if codec == "raw" else raw[:-1])
    again = store.put(cache, TOKENS, model=wide, codec=codec)
    assert store.get([*TOKENS, 0], model=wide).tokens >= FIRST
    assert again.tokens == len(TOKENS)


def test_what_is_stood_on_stays_though_its_tokens_are_damaged(chat, wide):
    """The put that finds the damage takes the base out of the answers, not off the disk."""
    store, entries, cache, codec = chat
    store.rm(entries[3].id, entries[1].id, entries[2].id)
    with open_document(entries[0].path) as document:
        flip(entries[0].path, document.entries["vkv.tokens"].start)
    store.put(cache, TOKENS, model=wide, codec=codec)
    assert store.get([*TOKENS, 0], model=wide).tokens == len(TOKENS)


def test_another_codec_does_not_stand_on_it(chat, wide):
    store, _, cache, codec = chat
    other = store.put(cache, TOKENS, model=wide, codec="affine:bits=8" if codec == "raw" else "raw")
    assert other.dependencies == ()
