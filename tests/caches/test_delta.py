"""A file that refers to the one it grew from holds only what is new."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from msgspec.structs import replace

import vkv
from fixtures.models import tiny
from vkv.errors import CacheError, DigestError, HeaderError, MismatchError, MissingFileError
from vkv.format import container_write, dependencies, framing, header
from vkv.format.document import open_document
from vkv.format.file_id import FileId

CODECS = ["raw", "affine:bits=4", "nsnquant:bits=2", "kvquant:bits=3", "tc:step=0.5"]
id_of = dependencies._id_of


def grow(cache, tokens: int, seed: int) -> None:
    keys = mx.random.normal((1, 2, tokens, 64), key=mx.random.key(seed)).astype(mx.float16)
    values = mx.random.normal((1, 2, tokens, 64), key=mx.random.key(seed + 1)).astype(mx.float16)
    cache.update_and_fetch(keys, values)


def save(path, cache, count: int, **options):
    return vkv.save(path, cache, tokens=range(count), durable=False, **options)


def chain(folder, codec: str, turns: int = 3, first: int = 300, turn: int = 70):
    """Files ``0.vkv`` … each of which stands on the ones before; the live cache at the end."""
    cache = [KVCache(), KVCache()]
    for i in range(turns):
        for layer in cache:
            grow(layer, turn if i else first, 10 * i)
        parent = folder / f"{i - 1}.vkv" if i else None
        save(folder / f"{i}.vkv", cache, first + turn * i, codec=codec, parent=parent)
    return cache


def values(path, **options) -> list[mx.array]:
    prompt = vkv.load(path, **options)
    return [x for layer in prompt.cache for x in (layer.keys, layer.values)]


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return len(a) == len(b) and all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_a_chain_decodes_as_its_files_do_and_stands_alone_when_inlined(tmp_path, codec):
    chain(tmp_path, codec)
    info = vkv.inspect(tmp_path / "2.vkv")
    assert len(info.dependencies) == 2
    assert info.accounting.adds_up
    assert info.accounting.external > 0
    assert vkv.validate(tmp_path / "2.vkv", deep=True).ok
    (tmp_path / "alone").mkdir()
    alone = vkv.convert(tmp_path / "2.vkv", tmp_path / "alone" / "2.vkv", inline=True)
    assert not alone.dependencies
    assert "files" not in alone.header.needs
    assert vkv.validate(tmp_path / "alone" / "2.vkv", deep=True).ok
    assert same(values(tmp_path / "2.vkv"), values(tmp_path / "alone" / "2.vkv"))
    packed = vkv.load(tmp_path / "2.vkv", live="packed")
    assert packed.tokens == list(range(440))


def test_raw_is_lossless_and_writes_what_is_new(tmp_path):
    cache = chain(tmp_path, "raw")
    loaded = vkv.load(tmp_path / "2.vkv").cache
    for layer, live in zip(loaded, cache, strict=True):
        assert mx.array_equal(layer.keys, live.keys[..., :440, :])
        assert mx.array_equal(layer.values, live.values[..., :440, :])
    whole = save(tmp_path / "whole.vkv", cache, 440)
    child = vkv.inspect(tmp_path / "2.vkv")
    assert child.size < 0.3 * whole.size
    assert child.accounting.external == 2 * 2 * 2 * 370 * 64 * 2


def test_a_turn_of_a_long_conversation_is_small(tmp_path):
    chain(tmp_path, "raw", turns=2, first=4000, turn=200)
    whole = 2 * 2 * 2 * 4200 * 64 * 2
    assert vkv.inspect(tmp_path / "1.vkv").size < 0.15 * whole


def test_raw_rows_that_differ_are_written(tmp_path):
    chain(tmp_path, "raw", turns=1)
    other = [KVCache(), KVCache()]
    for layer in other:
        grow(layer, 300, 99)
    info = save(tmp_path / "b.vkv", other, 300, parent=tmp_path / "0.vkv")
    assert not info.dependencies


def test_codes_of_other_tokens_are_not_taken(tmp_path):
    cache = chain(tmp_path, "affine:bits=4", turns=1)
    ids = [*range(299), 7]
    info = vkv.save(tmp_path / "b.vkv", cache, tokens=ids, codec="affine:bits=4",
                    parent=tmp_path / "0.vkv")  # fmt: skip
    assert not info.dependencies


@pytest.mark.parametrize("codec", ["raw", "affine:bits=8", "affine:bits=4,group=32"])
def test_codes_of_another_codec_are_not_taken(tmp_path, codec):
    cache = chain(tmp_path, "affine:bits=4", turns=1)
    info = save(tmp_path / "b.vkv", cache, 300, codec=codec, parent=tmp_path / "0.vkv")
    assert not info.dependencies
    assert info.codecs["keys"].startswith(codec.partition(",")[0])


def test_frozen_tables_are_gone_on_with(tmp_path):
    chain(tmp_path, "kvquant:bits=3")
    with open_document(tmp_path / "2.vkv") as document:
        keys = document.header.layers[0].tensors["keys"]
        coded = [s for s in keys.segments if s.codec == "kvquant"]
        levels = {document.header.tensors[s.parts["levels"]].digest for s in coded}
    assert len(coded) == 3
    assert len(levels) == 1


def test_layers_that_do_not_grow_are_written_whole(tmp_path):
    ring, state = RotatingKVCache(32), ArraysCache(1)
    state[0] = mx.ones((1, 4))
    lists = CacheList(KVCache(), RotatingKVCache(32))
    cache = [KVCache(), ring, state, lists]
    for layer in (cache[0], ring, *lists.caches):
        grow(layer, 60, 1)
    save(tmp_path / "a.vkv", cache, 60)
    grow(cache[0], 1, 5)
    for layer in (ring, *lists.caches):
        grow(layer, 1, 5)
    info = save(tmp_path / "b.vkv", cache, 61, parent=tmp_path / "a.vkv")
    with open_document(tmp_path / "b.vkv") as document:
        apart = sorted(n for n, s in document.header.tensors.items() if s.file is not None)
    assert apart == [f"layers.{at}.{n}.0.data" for at in ("0", "3.0") for n in ("keys", "values")]
    assert vkv.validate(tmp_path / "b.vkv", deep=True).ok
    assert vkv.load(tmp_path / "b.vkv").cache[1].offset == 61
    assert list(info.dependencies) == [vkv.inspect(tmp_path / "a.vkv").id]


def test_a_long_chain_is_written_whole_in_time(tmp_path):
    cache = chain(tmp_path, "affine:bits=4", turns=40, first=20, turn=3)
    info = vkv.inspect(tmp_path / "39.vkv")
    assert len(info.dependencies) <= 16
    assert cache[0].offset == 137
    assert vkv.validate(tmp_path / "39.vkv", deep=True).ok


def test_a_missing_file_is_named(tmp_path):
    chain(tmp_path, "affine:bits=4", turns=2)
    (tmp_path / "kept").mkdir()
    id_ = vkv.inspect(tmp_path / "0.vkv").id
    (tmp_path / "0.vkv").rename(tmp_path / "kept" / "elsewhere.vkv")
    with pytest.raises(MissingFileError, match=id_) as caught:
        vkv.load(tmp_path / "1.vkv")
    assert caught.value.rule == "H12"
    assert [f.rule for f in vkv.validate(tmp_path / "1.vkv").findings if f.severity == "error"] == [
        "H12"
    ]
    assert vkv.inspect(tmp_path / "1.vkv").dependencies.keys() == {id_}
    for place in (tmp_path / "kept", tmp_path / "kept" / "elsewhere.vkv"):
        assert vkv.load(tmp_path / "1.vkv", search_paths=[place]).tokens == list(range(370))
        assert vkv.validate(tmp_path / "1.vkv", search_paths=[place], deep=True).ok


def test_each_candidate_is_read_once_whatever_the_number_of_ids(tmp_path, monkeypatch):
    chain(tmp_path, "raw", turns=4, first=20, turn=5)
    (tmp_path / "a.vkv").write_bytes(b"no vkv file")
    seen = []
    monkeypatch.setattr(dependencies, "_id_of", lambda path: seen.append(path) or id_of(path))
    resolver = dependencies.FileResolver([tmp_path])
    for n in (1, 3, 0, 2, 1):
        with resolver.open(vkv.inspect(tmp_path / f"{n}.vkv").id) as document:
            assert document.name == str(tmp_path / f"{n}.vkv")
    assert sorted(seen) == [tmp_path / f"{n}.vkv" for n in range(4)]
    with pytest.raises(MissingFileError, match=r"is not in [^(]*; pass search_paths="):
        resolver.open(FileId("0" * 64))
    assert len(seen) == 5


def test_a_search_for_any_number_of_ids_ends(tmp_path, monkeypatch):
    chain(tmp_path, "raw", turns=4, first=20, turn=5)
    ids = [vkv.inspect(tmp_path / f"{n}.vkv").id for n in range(4)]
    monkeypatch.setattr(dependencies, "MAX_CANDIDATES", 2)
    resolver = dependencies.FileResolver([tmp_path])
    resolver.open(ids[1]).close()
    for _ in range(2):
        with pytest.raises(MissingFileError, match="the search ended after 2 files"):
            resolver.open(ids[3])
    resolver.open(ids[0]).close()
    (tmp_path / "3.vkv").rename(tmp_path / f"{ids[3]}.vkv")  # a name is not searched for
    resolver.open(ids[3]).close()


def test_files_that_only_say_that_they_have_an_id_are_not_opened(tmp_path, monkeypatch):
    """Thousands of them, with tables of a megabyte, cost no more than their first bytes."""
    chain(tmp_path, "raw", turns=2, first=20, turn=5)
    id_ = vkv.inspect(tmp_path / "0.vkv").id
    forms = [(framing.HEADER, "U8", (0,)), *((f"{n:0100}", "U8", (0,)) for n in range(9000))]
    false = framing.frame("1.0", id_, forms)
    true = (tmp_path / "0.vkv").read_bytes()
    for n in range(20):
        (tmp_path / f"0-{n}.vkv").write_bytes(false)
    (tmp_path / "0.vkv").rename(tmp_path / "1-true.vkv")
    opened = []
    open_ = dependencies.open_document
    monkeypatch.setattr(dependencies, "open_document", lambda p: opened.append(p) or open_(p))
    assert vkv.load(tmp_path / "1.vkv").tokens == list(range(25))
    assert opened == [tmp_path / "1-true.vkv"]
    for n in range(20):  # the right header, but damaged behind it
        (tmp_path / f"0-{n}.vkv").write_bytes(true + b"x")
    with pytest.raises(MissingFileError, match="the search ended after 16 damaged files"):
        vkv.load(tmp_path / "1.vkv")
    assert len(opened) == 17


def test_a_file_of_that_id_without_the_tensor_is_refused(tmp_path):
    chain(tmp_path, "raw", turns=2)
    with open_document(tmp_path / "1.vkv") as document, (tmp_path / "b.vkv").open("wb") as out:
        tensors = {
            name: replace(stored, digest=b"x" * 32) if stored.file else stored
            for name, stored in document.header.tensors.items()
        }
        head = header.replace(document.header, tensors=tensors)
        own = [e for e in document.entries.values() if e.name != framing.HEADER]
        loads = [((e.name, e.dtype, e.shape), lambda n=e.name: document.read(n)) for e in own]
        container_write.write(out.fileno(), loads, lambda _: header.dump(head))
    with pytest.raises(HeaderError) as caught:
        vkv.load(tmp_path / "b.vkv")
    assert caught.value.rule == "H12"
    assert not vkv.validate(tmp_path / "b.vkv").ok


def test_damage_in_the_other_file_is_found(tmp_path):
    chain(tmp_path, "raw", turns=2)
    data = bytearray((tmp_path / "0.vkv").read_bytes())
    data[-1] ^= 1
    (tmp_path / "0.vkv").write_bytes(data)
    with pytest.raises(DigestError):
        vkv.load(tmp_path / "1.vkv")
    assert not vkv.validate(tmp_path / "1.vkv").ok


def test_a_parent_of_another_model_is_refused(tmp_path):
    first, second = tiny.llama(seed=1), tiny.llama(seed=2)
    ids = mx.arange(8)[None]
    caches = []
    for model in (first, second):
        cache = make_prompt_cache(model)
        mx.eval(model(ids, cache=cache))
        caches.append(cache)
    vkv.save(tmp_path / "a.vkv", caches[0], tokens=ids, model=first)
    with pytest.raises(MismatchError, match="parent"):
        vkv.save(tmp_path / "b.vkv", caches[1], tokens=ids, model=second,
                 parent=tmp_path / "a.vkv")  # fmt: skip
    assert not (tmp_path / "b.vkv").exists()


@pytest.mark.parametrize("base", [0, 1])
def test_a_file_does_not_take_the_place_of_one_it_stands_on(tmp_path, base):
    cache = chain(tmp_path, "affine:bits=4", turns=2)
    before = (tmp_path / f"{base}.vkv").read_bytes()
    for layer in cache:
        grow(layer, 70, 99)
    with pytest.raises(CacheError) as caught:
        save(tmp_path / f"{base}.vkv", cache, 440, codec="affine:bits=4",
             parent=tmp_path / "1.vkv")  # fmt: skip
    assert caught.value.rule == "L10"
    assert (tmp_path / f"{base}.vkv").read_bytes() == before


@pytest.mark.parametrize("reencode", [False, True])
def test_a_file_that_the_loaded_one_depends_on_is_not_replaced(tmp_path, reencode):
    chain(tmp_path, "affine:bits=4", turns=2)
    before = (tmp_path / "0.vkv").read_bytes()
    prompt = vkv.load(tmp_path / "1.vkv")
    with pytest.raises(CacheError) as caught:
        vkv.save(tmp_path / "0.vkv", prompt, codec="affine:bits=8", reencode=reencode)
    assert caught.value.rule == "L10"
    assert (tmp_path / "0.vkv").read_bytes() == before
    vkv.save(tmp_path / "1.vkv", prompt, reencode=reencode)  # no file depends on this one
    assert vkv.validate(tmp_path / "1.vkv", deep=True).ok


def test_a_codebook_alone_is_not_worth_a_second_file(tmp_path):
    cache = chain(tmp_path, "nsnquant:bits=2", turns=1)
    other = vkv.save(tmp_path / "b.vkv", cache, tokens=range(5, 305), codec="nsnquant:bits=2",
                     parent=tmp_path / "0.vkv")  # fmt: skip
    assert not other.dependencies


def test_damage_of_a_parent_does_not_spread(tmp_path):
    for codec in ("raw", "affine:bits=4"):
        cache = chain(tmp_path, codec, turns=1)
        data = bytearray((tmp_path / "0.vkv").read_bytes())
        data[-1] ^= 1
        (tmp_path / "0.vkv").write_bytes(data)
        with pytest.raises(DigestError, match=r"0\.vkv"):
            save(tmp_path / "1.vkv", cache, 300, codec=codec, parent=tmp_path / "0.vkv")
        assert not (tmp_path / "1.vkv").exists()


def damaged_copy(path, name: str):
    """Copy a file beside itself under a name that is tried earlier, and flip its last bit."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.with_name(name).write_bytes(data)
    return path.with_name(name)


@pytest.mark.parametrize("codec", ["raw", "affine:bits=4", "tc:step=0.5"])
def test_a_sound_copy_of_a_dependency_serves_where_another_is_damaged(tmp_path, codec):
    cache = chain(tmp_path, codec, turns=2)
    expected = values(tmp_path / "1.vkv")
    damaged_copy(tmp_path / "0.vkv", f"{vkv.inspect(tmp_path / '0.vkv').id}.vkv")
    assert same(values(tmp_path / "1.vkv"), expected)
    assert vkv.validate(tmp_path / "1.vkv", deep=True).ok
    (tmp_path / "other").mkdir()
    for options in ({"inline": True}, {"codec": "raw"}):
        vkv.convert(tmp_path / "1.vkv", tmp_path / "other" / "b.vkv", **options)
        assert same(values(tmp_path / "other" / "b.vkv"), expected)
    for layer in cache:
        grow(layer, 70, 99)
    save(tmp_path / "2.vkv", cache, 440, codec=codec, parent=tmp_path / "1.vkv")
    assert vkv.inspect(tmp_path / "2.vkv").dependencies


def test_where_all_copies_are_damaged_the_first_is_named(tmp_path):
    chain(tmp_path, "affine:bits=4", turns=2)
    id_of_parent = vkv.inspect(tmp_path / "0.vkv").id
    first = damaged_copy(tmp_path / "0.vkv", f"{id_of_parent}.vkv")
    damaged_copy(tmp_path / "0.vkv", "0.vkv")
    with pytest.raises(DigestError) as caught:
        vkv.load(tmp_path / "1.vkv")
    assert str(caught.value).startswith(f"{first}: layers.")  # the file and the stored tensor
    assert first.name in str(vkv.validate(tmp_path / "1.vkv").findings)


@pytest.mark.parametrize("inline", [True, False])
def test_convert_does_not_replace_what_its_source_stands_on(tmp_path, inline):
    chain(tmp_path, "affine:bits=4", turns=2)
    before = (tmp_path / "0.vkv").read_bytes()
    with pytest.raises(CacheError) as caught:
        vkv.convert(tmp_path / "1.vkv", tmp_path / "0.vkv", inline=inline)
    assert caught.value.rule == "L10"
    assert (tmp_path / "0.vkv").read_bytes() == before


def test_many_names_for_one_tensor_of_another_file(tmp_path):
    """Every name would be read into memory of its own."""
    chain(tmp_path, "raw", turns=2, first=300, turn=1)
    with open_document(tmp_path / "1.vkv") as document, (tmp_path / "b.vkv").open("wb") as out:
        head = document.header
        one = next(stored for stored in head.tensors.values() if stored.file)
        tensors = {
            n: one if s.file and s.shape == one.shape else s for n, s in head.tensors.items()
        }
        extra = {f"layers.{i}.keys.0.data": one for i in range(9, 15)}
        tensor = next(t for t in head.layers[0].tensors.values())
        layers = tuple(
            replace(head.layers[0], tensors={
                "keys": replace(tensor, shape=(1, 2, 300, 64), segments=(
                    replace(tensor.segments[0], parts={"data": name}),)),
            }) for name in extra
        )  # fmt: skip
        head = header.replace(head, tensors=tensors | extra, layers=head.layers + layers)
        own = [e for e in document.entries.values() if e.name != framing.HEADER]
        loads = [((e.name, e.dtype, e.shape), lambda n=e.name: document.read(n)) for e in own]
        container_write.write(out.fileno(), loads, lambda _: header.dump(head))
    found = [f for f in vkv.validate(tmp_path / "b.vkv").findings if f.rule == "H12"]
    assert found
    assert "which has" in found[0].message
