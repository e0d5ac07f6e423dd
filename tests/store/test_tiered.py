"""A local store with a remote behind it."""

from __future__ import annotations

import logging

import pytest

import vkv
from tests.helpers import servers
from tests.helpers.stores import cache_of, held
from vkv.errors import VkvError
from vkv.store.remote import patience, transfer
from vkv.store.remote.objects import object_name
from vkv.store.remote.remote import Remote
from vkv.store.tiered import TieredStore

LONG = [n % 50 for n in range(200)]


@pytest.fixture
def url(tmp_path):
    return (tmp_path / "there").as_uri()


@pytest.fixture
def stocked(tmp_path, url, model):
    """Ids of what another machine has put and pushed: 100 and 200 tokens."""
    other = TieredStore(tmp_path / "other", remote=url, write_through=True)
    return [other.put(cache_of(LONG[:n]), LONG[:n], model=model).id for n in (100, 200)]


@pytest.fixture
def store(tmp_path, url):
    return TieredStore(tmp_path / "here", remote=url)


def test_what_is_not_here_is_fetched(store, stocked, model):
    hit = store.get([*LONG, 60], model=model)
    assert (hit.entry.id, hit.tokens, hit.rest) == (stocked[1], 200, [60])
    assert held(hit.cache[0]) == LONG
    assert [(e.id, e.dependencies) for e in store.ls()] == [(stocked[1], (stocked[0],))]
    again = vkv.PromptStore(store.root).get([*LONG, 60], model=model)
    assert again.tokens == 200


def test_only_what_is_longer_is_fetched(store, stocked, model):
    store.put(cache_of(LONG[:150]), LONG[:150], model=model)
    assert store.get([*LONG[:150], 60, 61], model=model).tokens == 150
    assert len(store.ls()) == 1
    assert store.get([*LONG, 60], model=model).tokens == 200
    assert len(store.ls()) == 2


def test_nothing_there_is_like_no_remote(store, model):
    assert store.get(LONG, model=model) is None
    assert not store.root.exists()
    store.put(cache_of(LONG), LONG, model=model)
    assert store.remote.ls() == []


def test_too_large_is_not_fetched(tmp_path, url, stocked, model):
    store = TieredStore(tmp_path / "small", remote=url, max_bytes=1000)
    assert store.get([*LONG, 60], model=model) is None
    assert not store.root.exists()


def test_damage_there_is_not_taken_in(store, stocked, model, tmp_path, caplog):
    path = tmp_path / "there" / object_name(stocked[1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.get([*LONG, 60], model=model).entry.id == stocked[0]
    assert [e.id for e in store.ls()] == [stocked[0]]
    assert "the bytes changed" in caplog.text


def test_a_remote_that_fails_is_left_alone_for_a_while(store, stocked, model, monkeypatch, caplog):
    store.put(cache_of(LONG[:50]), LONG[:50], model=model)
    asked = []

    def fails(self, *_, **__):
        asked.append(1)
        raise ConnectionRefusedError(111, "cannot be reached", "file:///there")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Remote, "find", fails)
        for _ in range(2):
            assert store.get([*LONG, 60], model=model).tokens == 50
    assert len(asked) == 1
    assert len(caplog.records) == 1
    monkeypatch.setattr(patience.time, "monotonic", lambda: 1e12)
    assert store.get([*LONG, 60], model=model).tokens == 200


def test_a_push_that_fails_does_not_fail_the_put(tmp_path, url, model, monkeypatch, caplog):
    store = TieredStore(tmp_path / "here", remote=url, write_through=True)
    (tmp_path / "there").touch()
    assert store.put(cache_of(LONG), LONG, model=model).tokens == 200
    assert len(caplog.records) == 1


def test_what_has_no_listings_is_refused(tmp_path):
    with servers.web() as web, pytest.raises(VkvError, match="http has no listings"):
        TieredStore(tmp_path / "here", remote=web.url)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        TieredStore(tmp_path / "here", remote="http://127.0.0.1:1")


def test_pull_and_push_by_id(store, stocked, model, tmp_path):
    assert store.pull(stocked[0][:10]).id == stocked[0]
    elsewhere = TieredStore(store.root, remote=(tmp_path / "second").as_uri())
    assert elsewhere.push(stocked[0]) == stocked[0]
    assert [key for key, _ in elsewhere.remote.ls()] == [stocked[0]]


def test_what_an_entry_stands_on_comes_with_it(store, url, tmp_path, model):
    vkv.save(tmp_path / "a.vkv", cache_of(LONG[:100]), tokens=LONG[:100], model=model)
    grown = tmp_path / "b.vkv"
    vkv.save(grown, cache_of(LONG), tokens=LONG, model=model, parent=tmp_path / "a.vkv")
    Remote(url).push(grown)
    store.find([*LONG, 60], model=model)
    ids = {vkv.inspect(path).id for path in (grown, tmp_path / "a.vkv")}
    (entry,) = store.ls()
    assert {entry.id, *entry.dependencies} == ids
    elsewhere = TieredStore(store.root, remote=(tmp_path / "second").as_uri())
    elsewhere.push(vkv.inspect(grown).id)
    assert {key for key, _ in elsewhere.remote.ls()} == ids


def test_an_interrupted_pull_into_the_store_is_gone_on_with(store, stocked, model, monkeypatch):
    monkeypatch.setattr(transfer, "READ_CHUNK", 1 << 14)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(stocked[0], progress=stop)
    assert store.ls() == []
    (part,) = (store.root / "incoming").iterdir()
    held_back = part.stat().st_size
    told = []
    store.pull(stocked[0], progress=lambda done, _: told.append(done))
    assert min(told) > held_back > 0
    assert [e.id for e in store.ls()] == [stocked[0]]
    assert list((store.root / "incoming").iterdir()) == []
