"""What notebooks show: escaped, without secrets, for everything a user holds."""

from __future__ import annotations

from html.parser import HTMLParser

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import vkv
from fixtures.models import tiny
from vkv.format.info import Info
from vkv.store.tiered import TieredStore

EVIL = "<script>alert(1)</script>"
SECRET = "https://user:password@example.com/a.vkv?token=abc"


class Checked(HTMLParser):
    """Collect the text of a table; refuse any other element, and any left open."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "tr", "th", "td")
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def filled(tokens: int = 40) -> KVCache:
    cache = KVCache()
    key, value = (mx.random.normal((1, 2, tokens, 64), key=mx.random.key(i)) for i in (0, 1))
    cache.update_and_fetch(key, value)
    return cache


def test_a_file_and_a_difference(tmp_path):
    a, b = tmp_path / f"{EVIL.replace('/', '_')}.vkv", tmp_path / "b.vkv"
    info = vkv.save(a, [filled()], tokens=range(40))
    vkv.save(b, [filled()], tokens=range(40), codec="affine:bits=4", metadata={EVIL: EVIL})
    words = Checked(info._repr_html_()).words
    assert info.id in words
    assert f"{info.size:,} bytes" in words
    found = vkv.diff(a, b, deep=True)
    assert found.summary in repr(found)
    assert any("relative squared error" in w for w in Checked(found._repr_html_()).words)
    assert Checked(vkv.diff(a, a)._repr_html_()).words[0] == "no difference"


def test_urls_are_shown_without_secrets(tmp_path):
    vkv.save(tmp_path / "a.vkv", [filled()], tokens=range(40))
    local = vkv.inspect(tmp_path / "a.vkv")
    info = Info(SECRET, local.id, local.size, local.header, local.accounting)
    prompt = vkv.Prompt([filled()], list(range(40)), info)
    diff = vkv.Diff(SECRET, SECRET)
    for shown in (info, prompt, diff):
        for words in (repr(shown), shown._repr_html_()):
            assert "https://example.com/a.vkv" in words
            assert "password" not in words
            assert "token=abc" not in words


def test_a_prompt_and_packed_caches():
    model = tiny.llama(head_dim=64)
    cache = vkv.make_prompt_cache(model, "affine:bits=4")
    model(mx.arange(30)[None], cache=cache)
    packed = cache[0]
    assert "30 tokens, affine:bits=4, " in repr(packed)
    assert "affine:bits=4" in Checked(packed._repr_html_()).words
    prompt = vkv.Prompt(cache, list(range(30)), notes=[EVIL])
    words = Checked(prompt._repr_html_()).words
    assert f"{len(cache)} {type(packed).__name__}" in words
    assert EVIL in words


def test_stores(tmp_path):
    model = tiny.llama(head_dim=64)
    with vkv.PromptStore(tmp_path / "store") as store:
        assert "0 entries" in Checked(store._repr_html_()).words[0]
        prompt = vkv.prefill(model, list(range(20)))
        entry = store.put(prompt.cache, list(range(20)), model=model, name=EVIL)
        words = Checked(store._repr_html_()).words
        assert entry.id[:12] in words
        assert EVIL in words
        assert len(store) == 1
        assert [e.id for e in store] == [entry.id]
    (tmp_path / "remote").mkdir()
    remote = f"file://{tmp_path}/remote"
    with TieredStore(tmp_path / "store", remote=remote) as tiered:
        assert repr(tiered).startswith("<TieredStore ")
        assert remote in repr(tiered)
        assert entry.id[:12] in Checked(tiered._repr_html_()).words
