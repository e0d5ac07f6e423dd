"""Entries that stand on a basis: a file of tables without tokens, which is no entry."""

from __future__ import annotations

import mlx.core as mx
import pytest

import vkv
from tests.helpers.basis import MODEL, OTHER, caches, text, train
from vkv.errors import CacheError, MismatchError, MissingFileError
from vkv.store import Remote, TieredStore

IDS = text(9, 240)
SHORT, LONG = IDS[:120], IDS
CODEC = "tc:step=0.3"


@pytest.fixture(scope="module")
def basis(tmp_path_factory):
    path = tmp_path_factory.mktemp("basis") / "tiny.basis.vkv"
    train(path)
    return path


@pytest.fixture(scope="module")
def key(basis):
    return vkv.inspect(basis).id


@pytest.fixture
def path(tmp_path, basis):
    """A file that stands on the basis, which is in another folder."""
    options = {"tokens": LONG, "model": MODEL, "codec": CODEC, "basis": basis}
    vkv.save(tmp_path / "long.vkv", caches(tokens=len(LONG)), **options)
    return tmp_path / "long.vkv"


def put(store, tokens, basis, **options):
    cache = caches(tokens=len(tokens))
    return store.put(cache, tokens, model=MODEL, codec=CODEC, basis=basis, **options)


def names(store):
    return {path.stem for path in (store.root / "objects").rglob("*.vkv")}


def sound(store):
    return store.verify(deep=True).findings == [] and store.gc().files == []


def equal(hit, path, **options):
    found = vkv.load(path, **options).cache
    return all(
        bool(mx.array_equal(getattr(a, name), getattr(b, name)))
        for a, b in zip(hit.cache, found, strict=True)
        for name in ("keys", "values")
    )


def test_put_keeps_the_basis_as_long_as_an_entry_stands_on_it(store, basis, key, path):
    entry = put(store, LONG, basis)
    assert (entry.dependencies, names(store)) == ((key,), {entry.id, key})
    assert [e.id for e in store.ls()] == [entry.id]
    assert sound(store)
    assert equal(store.get([*LONG, 1], model=MODEL), path, search_paths=[basis])
    other = store.put(caches(seed=3, tokens=120), text(3, 120), model=MODEL, codec=CODEC,
                      basis=basis)  # fmt: skip
    store.rm(entry.id)
    assert names(store) == {other.id, key}
    assert sound(store)
    store.rm(other.id)
    assert names(store) == set()


def test_a_conversation_that_grows(store, basis, key):
    first = put(store, SHORT, basis)
    grown = put(store, LONG, basis)
    assert key in grown.dependencies
    assert names(store) == {first.id, grown.id, key}
    assert store.get([*LONG, 1], model=MODEL).tokens == len(LONG)
    assert store.reindex() == []
    assert sound(store)
    assert {e.id for e in store.ls()} == {first.id, grown.id}


def test_what_was_loaded_stands_on_the_same_basis_again(store, basis, key):
    put(store, SHORT, basis)
    hit = store.get([*SHORT, 1], model=MODEL)
    MODEL(mx.array([LONG[len(SHORT) :]]), cache=hit.cache)
    grown = store.put(hit.cache, LONG, model=MODEL, codec=CODEC)
    assert key in grown.dependencies
    assert sound(store)


def test_export_stands_alone(store, basis, path, tmp_path):
    entry = put(store, LONG, basis)
    store.export(entry.id, tmp_path / "alone.vkv")
    assert vkv.inspect(tmp_path / "alone.vkv").dependencies == {}
    assert equal(store.get([*LONG, 1], model=MODEL), tmp_path / "alone.vkv")


def test_add_takes_the_basis_in(store, basis, key, path):
    with pytest.raises(MissingFileError, match=key):
        store.add(path)
    assert (store.ls(), names(store)) == ([], set())
    entry = store.add(path, search_paths=[basis])
    assert names(store) == {entry.id, key}
    assert equal(store.get([*LONG, 1], model=MODEL), path, search_paths=[basis])


def test_a_basis_alone_is_no_entry(store, basis):
    with pytest.raises(CacheError, match="holds no token ids"):
        store.add(basis)
    assert store.ls() == []


def test_another_models_basis_is_refused(store, tmp_path):
    train(tmp_path / "other.vkv", OTHER)
    with pytest.raises(MismatchError):
        put(store, SHORT, tmp_path / "other.vkv")
    assert store.ls() == []


def test_a_remote_has_it_too(tmp_path, basis, key, path):
    url = (tmp_path / "there").as_uri()
    entry = put(TieredStore(tmp_path / "a", remote=url, write_through=True), LONG, basis)
    assert {name for name, _ in Remote(url).ls()} == {entry.id, key}
    other = TieredStore(tmp_path / "b", remote=url)
    assert equal(other.get([*LONG, 1], model=MODEL), path, search_paths=[basis])
    assert (names(other), len(other.ls())) == ({entry.id, key}, 1)
    assert sound(other)
    (tmp_path / "in").mkdir()
    pulled = Remote(url).pull(entry.id, tmp_path / "in")
    assert vkv.load(pulled, model=MODEL).tokens == LONG


def test_a_file_is_pushed_with_its_basis(tmp_path, basis, key, path):
    there = Remote((tmp_path / "there").as_uri())
    pushed = there.push(path, search_paths=[basis])
    assert {name for name, _ in there.ls()} == {pushed, key}


def test_a_damaged_basis_takes_its_entries_along(store, basis, key):
    entry = put(store, SHORT, basis)
    (held,) = store.root.glob(f"objects/*/{key}.vkv")
    data = bytearray(held.read_bytes())
    data[-1] ^= 1
    held.write_bytes(data)
    assert store.get([*SHORT, 1], model=MODEL) is None
    assert (store.ls(), names(store)) == ([], set())
    assert put(store, SHORT, basis).id == entry.id
    assert sound(store)
