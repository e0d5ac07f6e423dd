"""A served model finds its prompts again: in memory, on disk, after a restart."""

from __future__ import annotations

import json
import logging
import threading
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import vkv
from fixtures.models import tiny
from tests.serve.conftest import FIRST, SECOND, SYSTEM, ask, common, messages, post, tokens
from vkv.errors import UnsupportedError, VkvError
from vkv.serve import Disk, Server, upstream
from vkv.serve.disk import fits

THIRD = "May I bring my dog?"
#: Tokens that both questions begin with.
SHARED = common(tokens(FIRST), tokens(SECOND))
#: Tokens of the system prompt, up to the first that depends on the question.
SYSTEM_ONLY = common(tokens("a"), tokens("b"))


def stored(server):
    """Lengths of all entries. Complete once the server is closed: it answers, then writes."""
    return sorted(e.tokens for e in server.disk.store.ls())


@pytest.mark.parametrize("single", [False, True], ids=["batched", "single"])
def test_a_shared_prefix_is_computed_once(serving, single):
    """A request with a seed is not batched."""
    options = {"seed": 1} if single else {}
    with serving() as server:
        first = ask(server, FIRST, **options)
        again = ask(server, SECOND, **options)
        assert (first.cached, again.cached) == (0, SHARED)
        assert again.prompt == len(tokens(SECOND))
    assert stored(server)[-1] >= len(tokens(FIRST))
    with serving() as server:
        after = ask(server, SECOND, **options)
        assert after.cached == len(tokens(SECOND)) - 1
        assert after.text == again.text
        np.testing.assert_allclose(after.logprobs, again.logprobs, rtol=1e-4, atol=1e-5)


def test_answers_are_those_of_a_server_without_a_store(serving, tmp_path):
    with serving(write=False, root=tmp_path / "none") as server:
        want = ask(server, SECOND)
        assert not (tmp_path / "none").exists()
    with serving() as server:
        ask(server, FIRST)
    with serving() as server:
        found = ask(server, SECOND)
        assert found.cached == SHARED
        np.testing.assert_allclose(found.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)
        assert found.text == want.text


@pytest.mark.parametrize("name", ["lfm2", "gemma3_text"])
def test_caches_that_cannot_be_trimmed_are_used_whole(serving, name):
    """Recurrent state, and windows that have wrapped: the system prompt is an entry."""
    with serving(name) as server:
        want = ask(server, SECOND)
        assert ask(server, FIRST).cached == SYSTEM_ONLY
    assert SYSTEM_ONLY in stored(server)
    with serving(name) as server:
        assert ask(server, THIRD).cached == SYSTEM_ONLY
        found = ask(server, SECOND)
        assert found.cached == found.prompt - 1
        np.testing.assert_allclose(found.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)


def test_streaming_says_the_same(serving):
    with serving() as server:
        ask(server, FIRST)
    with serving() as server:
        body = {"messages": messages(SECOND), "max_tokens": 6, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        lines = post(server, "chat/completions", **body, **usage).decode().split("\n\n")
        data = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]
        assert data[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == SHARED
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in data[:-1])
        assert text == ask(server, SECOND).text


def test_two_at_a_time(serving):
    """Prompts of two lengths, one batch: both are stored, and found after a restart."""
    systems = [f"{SYSTEM} Number {i}. " + "Be brief. " * 5 * i for i in range(2)]
    questions = [FIRST, SECOND]

    def both(server):
        answers = [None, None]

        def one(i):
            answers[i] = ask(server, questions[i], systems[i], max_tokens=24)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    with serving() as server:
        before = both(server)
    with serving() as server:
        after = both(server)
        assert [a.cached for a in after] == [a.prompt - 1 for a in after]
        for a, b in zip(after, before, strict=True):
            assert a.text == b.text
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-3, atol=1e-4)


def test_a_prompt_that_equals_an_entry(serving):
    """mlx-lm's own cache would leave nothing to compute, and the server would die of it."""
    with serving() as server:
        prompt = SYSTEM * 2
        first = json.loads(post(server, "completions", prompt=prompt, max_tokens=1))
        whole = prompt + first["choices"][0]["text"]
        for _ in range(2):
            again = json.loads(post(server, "completions", prompt=whole, max_tokens=1))
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert len(whole.encode()) - 2 <= cached <= len(whole.encode()) - 1


def test_a_damaged_entry_is_a_miss(serving, caplog):
    with serving() as server:
        want = ask(server, FIRST)
    for entry in server.disk.store.ls():
        data = bytearray(entry.path.read_bytes())
        data[-100] ^= 1
        entry.path.write_bytes(data)
    damaged = len(server.disk.store.ls())
    caplog.clear()
    with serving() as server:
        found = ask(server, FIRST)
        assert (found.cached, found.text) == (0, want.text)
        reasons = [r for r in caplog.records if r.name == "vkv.store"]
        assert len(reasons) == damaged
        assert all("D1" in r.message and "\n" not in r.message for r in reasons)
    assert stored(server), "it is stored again"


def a_file(root):
    root.write_text("not a directory")


def a_broken_index(root):
    root.mkdir()
    vkv.store.local.layout.Layout(root).index.write_bytes(b"no database" * 999)


@pytest.mark.parametrize(
    ("broken", "write"), [(a_file, True), (a_broken_index, True), (a_broken_index, False)]
)
def test_a_store_that_cannot_be_used(serving, tmp_path, caplog, write, broken):
    broken(tmp_path / "broken")
    with serving(root=tmp_path / "broken", write=write) as server:
        assert ask(server, FIRST).cached == 0
        assert ask(server, SECOND).cached == SHARED, "memory still serves"
    ours = [r for r in caplog.records if r.name.startswith("vkv") and r.levelno >= logging.WARNING]
    assert len(ours) == 1


def test_only_what_is_worth_it_is_written_and_read(serving):
    with serving(min_tokens=len(tokens(FIRST)) + 50) as server:
        ask(server, FIRST)
    assert stored(server) == []
    with serving() as server:
        ask(server, SECOND)
    once = stored(server)
    with serving() as server:
        ask(server, "Hello", max_tokens=1)
    assert stored(server) == once, "too little is new"
    with serving(min_tokens=len(tokens(SECOND))) as server:
        assert ask(server, SECOND).cached == 0


def test_no_write(serving):
    with serving(write=False) as server:
        ask(server, FIRST)
        assert not server.disk.store.root.exists()


def test_codec_of_what_is_written(serving, model_dir):
    with serving(codec="affine:bits=8,group=32") as server:
        ask(server, FIRST)
    entry = server.disk.store.ls()[0]
    assert entry.codec.startswith("affine")
    assert entry.label == model_dir().name
    assert vkv.inspect(entry.path).to_dict()["tokenizer"] is not None


@pytest.mark.skipif(version("mlx-lm").startswith("0.31."), reason="0.31 has no --kv-bits")
def test_quantized_caches(serving):
    flags = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    with serving(flags=flags, kv_bits=8) as server:
        want = ask(server, FIRST)
    with serving(flags=flags, kv_bits=8) as server:
        found = ask(server, FIRST)
        assert (found.cached, found.text) == (found.prompt - 1, want.text)
    with serving() as server:
        assert ask(server, FIRST).cached == 0, "of no use to a server that batches"
    with serving() as server:
        assert ask(server, FIRST).cached == found.prompt - 1


def cache(cls, *args, **options):
    made = cls(*args, **options)
    made.update_and_fetch(*(mx.zeros((1, 2, 4, 64)) for _ in range(2)))
    return made


@pytest.mark.parametrize(
    ("caches", "bits", "good"),
    [
        (lambda: [cache(KVCache), cache(KVCache)], None, True),
        (lambda: [cache(KVCache)], None, False),
        (lambda: [cache(KVCache), cache(RotatingKVCache, 8)], None, False),
        (lambda: [cache(QuantizedKVCache, bits=4)] * 2, None, False),
        (lambda: [cache(QuantizedKVCache, bits=4)] * 2, 8, False),
        (lambda: [cache(QuantizedKVCache, bits=4)] * 2, 4, True),
    ],
    ids=["same", "too few", "rotating", "quantized", "other bits", "same bits"],
)
def test_which_caches_fit(caches, bits, good):
    assert fits(caches(), tiny.llama(), bits) is good


def test_windows_of_another_size_do_not_fit():
    window = cache(RotatingKVCache, 32)
    assert fits([cache(KVCache), window], tiny.llama(window=32))
    assert not fits([cache(KVCache), window], tiny.llama(window=16))


class Models:
    """A loaded model, as the generator has it."""

    def __init__(self, draft=None):
        self.model, self.tokenizer, self.draft_model = tiny.llama(), None, draft
        self.model_key = ("model", None, None)


@pytest.mark.parametrize(
    ("models", "prompt"),
    [(Models("draft"), range(100)), (Models(), [-5, *range(100)])],
    ids=["draft model", "images"],
)
def test_what_no_store_holds(tmp_path, models, prompt):
    disk = Disk(tmp_path / "store", min_tokens=8)
    held = [cache(KVCache), cache(KVCache)]
    disk.offer(models, list(prompt), held)
    assert disk.get(models, list(prompt), 0) is None
    disk.close(10)
    assert not (tmp_path / "store").exists()
    assert disk.writer.written == 0


def test_close_flushes_what_waits(serving):
    with serving() as server:
        want = ask(server, FIRST).prompt
    assert max(e.tokens for e in server.disk.store.ls()) > want


def test_a_model_that_cannot_be_loaded(tmp_path):
    server = Server(upstream.arguments(model=str(tmp_path), port=0), Disk(tmp_path / "store"))
    try:
        with pytest.raises(Exception, match=r"config\.json"):
            server.start()
    finally:
        server.close()


def test_a_port_in_use(serving, model_dir, tmp_path):
    with serving() as server:
        port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
        disk = Disk(tmp_path / "store")
        with pytest.raises(VkvError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            Server(upstream.arguments(model=str(model_dir()), port=port), disk)


@pytest.mark.skipif(not version("mlx-lm").startswith("0.31."), reason="0.32 has it")
def test_a_flag_of_a_newer_release_is_refused():
    with pytest.raises(UnsupportedError, match="has no --kv-bits"):
        upstream.arguments(model="m", kv_bits=4)
