"""A store answers the longest usable prefix over the checkpoints of all entries."""

from __future__ import annotations

import os
import random
import sqlite3
from typing import Any

import mlx.core as mx
import pytest

import vkv
from fixtures.models import tiny
from tests.helpers.stores import consistent
from vkv.format import container_write, header
from vkv.store.local import listing, lookup, summary
from vkv.store.local.prefix_tree import WIDTH
from vkv.store.local.removal import take_out
from vkv.store.local.summary import Description

IDS = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(120)]


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return tiny.MODELS["qwen3_next"]()


def put(store: vkv.PromptStore, model: Any, ids: list[int] = IDS, at: Any = (30, 60, 90)) -> Any:
    prompt = vkv.prefill(model, ids, checkpoints=at, step=16)
    return store.put(prompt.cache, ids, model=model)


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2", "falcon_h1", "mamba2"])
@pytest.mark.parametrize(("shared", "covered"), [(29, 0), (75, 60), (119, 119), (120, 120)])
def test_the_longest_checkpoint_that_leads_is_the_answer(store, name, shared, covered):
    model = tiny.MODELS[name]()
    entry = put(store, model)
    ids = [*IDS[:shared], 5, 6, 7]
    found = store.find(ids, model=model)
    assert (0 if found is None else found.tokens) == covered
    hit = store.get(ids, model=model)
    if covered == 0:
        assert hit is None
        return
    assert (hit.entry.id, hit.tokens, hit.rest) == (entry.id, covered, ids[covered:])
    got = model(mx.array([hit.rest]), cache=hit.cache)[:, -1]
    fresh = vkv.prefill(model, ids[:covered], step=16)
    want = model(mx.array([hit.rest]), cache=fresh.cache)[:, -1]
    assert mx.allclose(got, want, atol=2e-6)


def test_over_all_entries(store, hybrid):
    put(store, hybrid, IDS, (30,))
    other = [*IDS[:80], *[9] * 40]
    longer = put(store, hybrid, other, (20, 70))
    plain = [*IDS[:75], *[4] * 5]
    whole = store.put(vkv.prefill(hybrid, plain).cache, plain, model=hybrid)
    found = store.find([*IDS[:78], 1, 2], model=hybrid)
    assert (found.entry.id, found.tokens) == (longer.id, 70)
    assert store.find([*plain, 1], model=hybrid).entry.id == whole.id
    consistent(store)


def test_an_entry_that_is_gone_is_no_answer(store, hybrid):
    first, second = put(store, hybrid), put(store, hybrid, [*IDS[:60], *[3] * 30], (30, 60))
    asked = [*IDS[:65], 1]
    store.rm(second.id)
    assert store.find(asked, model=hybrid).entry.id == first.id
    assert consistent(store) == [first.id]
    store.rm(first.id)
    assert store.find(asked, model=hybrid) is None
    with store._index.read() as db:
        assert db.execute("SELECT count(*) FROM nodes").fetchone()[0] == 0
        assert db.execute("SELECT count(*) FROM points").fetchone()[0] == 0


def test_a_new_index_lists_them(store, hybrid):
    put(store, hybrid)
    assert store.reindex() == []
    assert store.find([*IDS[:65], 1], model=hybrid).tokens == 60


def aged(store: vkv.PromptStore, hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the index of a build that knew no checkpoints."""
    with monkeypatch.context() as patch:
        patch.setattr(summary, "usable_checkpoints", lambda head: ())
        put(store, hybrid)
    store.close()
    with sqlite3.connect(store._layout.index) as db:
        db.execute("DROP TABLE points")
        db.execute("PRAGMA user_version = 1")
    db.close()


def test_an_index_of_an_older_build_gets_them(store, hybrid, monkeypatch):
    aged(store, hybrid, monkeypatch)
    assert store.find([*IDS[:65], 1], model=hybrid).tokens == 60
    consistent(store)
    put(store, hybrid, [*IDS[:50], *[8] * 20], (40,))
    assert store.find([*IDS[:45], 1], model=hybrid).tokens == 40


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_index_of_an_older_build_that_can_only_be_read(store, hybrid, monkeypatch):
    aged(store, hybrid, monkeypatch)
    for path in (store._layout.index, store.root):
        path.chmod(0o555)
    try:
        assert store.find([*IDS[:65], 1], model=hybrid) is None
        assert store.get([*IDS, 1], model=hybrid).tokens == 120
    finally:
        store.root.chmod(0o755)


def test_a_read_only_connection_to_an_older_index(store, hybrid, monkeypatch):
    """As above, for whoever may write everywhere."""
    aged(store, hybrid, monkeypatch)
    db = store._index._opener._read_only()
    assert db.execute("SELECT count(*) FROM points").fetchone()[0] == 0
    db.close()


def test_a_checkpoint_in_a_wrong_place_is_corrected(store, hybrid):
    """An older build removes nodes that it thinks nobody needs; their numbers come back."""
    put(store, hybrid)
    other = put(store, hybrid, [3] * 50, (20, 40))
    with store._index.write() as db:
        query = "UPDATE OR REPLACE points SET entry = (SELECT n FROM entries WHERE id = ?)"
        db.execute(query, (other.id,))
    assert store.find([*IDS[:65], 1], model=hybrid) is None
    assert store.get([*[3] * 45, 1], model=hybrid).tokens == 40
    store.reindex()
    assert store.find([*IDS[:65], 1], model=hybrid).tokens == 60
    consistent(store)


def described(store: vkv.PromptStore, tokens: bytes, points: tuple[int, ...]) -> Description:
    key = container_write.digest(tokens + bytes(str(points), "ascii")).hex()
    path = store._layout.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tokens)
    needs = f"+checkpoints raw@1 vkv@{header.MAJOR}"
    return Description(
        key=key, size=len(tokens), model=bytes(32), label="", codec="raw", name="", tags=(),
        needs=needs, trims=False, tokens=tokens, digest=container_write.digest(tokens),
        tokens_at=0, dependencies=(), content=bytes.fromhex(key), checkpoints=points,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_no_better_answer_is_missed(store, seed):
    """Prompts over two tokens share beginnings of every length; some entries go again."""
    chance = random.Random(seed)
    kept: dict[int, Description] = {}
    with store._index.write() as db:
        for step in range(60):
            if kept and chance.random() < 0.3:
                number = chance.choice(list(kept))
                del kept[number]
                take_out(db, [number])
            else:
                count = chance.randrange(2, 14)
                tokens = b"".join(chance.choice((b"a\0\0\0", b"b\0\0\0")) for _ in range(count))
                points = tuple(sorted(chance.sample(range(1, count), chance.randrange(count))))
                what = described(store, tokens, points)
                number = listing.add(db, store._layout, what, step, [])
                kept[number] = what
            asked = b"".join(chance.choice((b"a\0\0\0", b"b\0\0\0")) for _ in range(14))
            found = lookup.longest(db, store._layout, bytes(32), asked)
            best = max((w.covers(shared(w.tokens, asked)) for w in kept.values()), default=0)
            assert (0 if found is None else found[1]) == best
            assert found is None or kept[found[0]["n"]].covers(
                shared(kept[found[0]["n"]].tokens, asked)
            ) == best  # fmt: skip
        for number in list(kept):
            take_out(db, [number])
        assert db.execute("SELECT count(*) FROM nodes").fetchone()[0] == 0


def shared(a: bytes, b: bytes) -> int:
    pairs = zip(range(0, len(a), WIDTH), range(0, len(b), WIDTH), strict=False)
    for n, (i, _) in enumerate(pairs):
        if a[i : i + WIDTH] != b[i : i + WIDTH]:
            return n
    return min(len(a), len(b)) // WIDTH


def test_a_remote_answers_them_too(tmp_path, hybrid):
    (tmp_path / "far").mkdir()
    store = vkv.PromptStore(tmp_path / "near")
    entry = put(store, hybrid)
    remote = vkv.Remote(f"file://{tmp_path / 'far'}")
    remote.push(entry.path)
    for count, covered in ((65, 60), (29, 0), (120, 120)):
        match = remote.find([*IDS[:count], 1, 2], model=hybrid)
        assert (0 if match is None else match.tokens) == covered
    tiered = vkv.TieredStore(tmp_path / "other", remote=remote)
    assert tiered.get([*IDS[:65], 1, 2], model=hybrid).tokens == 60
