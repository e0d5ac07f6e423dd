"""``vkv.convert``: every file that mlx-lm wrote, hostile variants of them, and vkv files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

import vkv
from vkv.caches.kinds.live import snapshot, visible
from vkv.codecs.protocol import DTYPES, memory
from vkv.errors import CacheError, MismatchError, VkvError
from vkv.format.kinds import KINDS
from vkv.interop import files as mlx_lm_files

FIXTURES = Path(__file__).parents[2] / "fixtures" / "mlx_lm"
CASES = [
    {**case, "path": folder / case["file"], "id": f"{folder.name}/{case['file']}"}
    for folder in sorted(FIXTURES.iterdir())
    for case in json.loads((folder / "manifest.json").read_text())
]
INSTALLED = ".".join(version("mlx-lm").split(".")[:2])
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])


def formula(positions, shape, seed, dtype):
    """What ``fixtures/write/mlx_lm_cases.py`` feeds a cache at ``positions``."""
    p = np.array(positions).reshape(1, -1, 1)
    h, d = np.arange(shape[1])[:, None, None], np.arange(shape[3])
    x = ((p * 7 + h * 3 + d * 5 + seed) % 31 - 15) / 4
    return mx.array(np.where(d == 0, p + 0 * x, x)[None]).astype(DTYPES[dtype])


def state(shape, seed, dtype):
    x = ((np.arange(prod(shape)) * 7 + seed) % 31 - 15) / 4
    return mx.array(x.reshape(shape)).astype(DTYPES[dtype])


def expected(record, name):
    tensor = record["tensors"][name]
    if "data" in tensor:
        return mx.array(tensor["data"]).astype(DTYPES[tensor["dtype"]])
    if record["class"] in ("ArraysCache", "MambaCache"):
        return state(tensor["shape"], tensor["seed"], tensor["dtype"])
    return formula(record["positions"], tensor["shape"], tensor["seed"], tensor["dtype"])


def same_bits(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(
        memory(mx.contiguous(a)) if a.size else b""
    ) == bytes(memory(mx.contiguous(b)) if b.size else b"")


def check_snapshot(found, record):
    """A cache's content against the manifest."""
    kind = {"MambaCache": "ArraysCache"}.get(record["class"], record["class"])
    assert KINDS[found.kind].class_names[0] == kind
    if kind == "CacheList":
        for child, inner in zip(found.children, record["children"], strict=True):
            check_snapshot(child, inner)
        return
    assert found.scalars == record["scalars"]
    held = record["tensors"] if record.get("positions") != [] else {}
    assert found.values.keys() == held.keys()
    for name, value in found.values.items():
        want = expected(record, name)
        if not value.encoded:
            assert same_bits(value.x, want)
        else:
            (kept,) = value.encoded
            got = kept.decode(value.shape, mx.float32)
            step = mx.abs(kept.parts["scales"].astype(mx.float32)).max().item()
            assert mx.abs(got - want.astype(mx.float32)).max().item() <= 1.1 * step


def check_same(a, b):
    """Two snapshots are equal to the bit."""
    assert (a.kind, a.scalars, a.values.keys()) == (b.kind, b.scalars, b.values.keys())
    for name, x in a.values.items():
        y = b.values[name]
        assert (x.shape, x.dtype, x.tokens) == (y.shape, y.dtype, y.tokens)
        assert x.encoded or same_bits(x.x, y.x)
        for k, m in zip(x.encoded, y.encoded, strict=True):
            assert (k.codec, k.tokens, k.parts.keys()) == (m.codec, m.tokens, m.parts.keys())
            assert all(same_bits(part, m.parts[n]) for n, part in k.parts.items())
    for child, other in zip(a.children, b.children, strict=True):
        check_same(child, other)


@every
def test_bytes_are_frozen(case):
    raw = case["path"].read_bytes()
    assert hashlib.sha256(raw).hexdigest() == case["sha256"]
    assert len(raw) < 8192


def test_every_fixture_is_in_a_manifest():
    assert {c["path"] for c in CASES} == set(FIXTURES.glob("*/*.safetensors"))


@every
def test_content(case):
    layers, metadata = mlx_lm_files.read(case["path"])
    assert metadata == case["metadata"]
    for taken, record in zip(layers, case["layers"], strict=True):
        check_snapshot(taken, record)


def offsets(taken):
    return {s.scalars["offset"] for s in taken.walk() if s.scalars.get("offset")}


@every
def test_converted(case, tmp_path):
    """As it was read, but for the rows of a ring that no later token can see."""
    layers, _ = mlx_lm_files.read(case["path"])
    if len(set().union(*map(offsets, layers))) > 1:  # made so to have many forms in one file
        with pytest.raises(CacheError) as caught:
            vkv.convert(case["path"], tmp_path / "a.vkv")
        assert caught.value.rule == "L6"
        return
    info = vkv.convert(case["path"], tmp_path / "a.vkv")
    assert info.metadata == case["metadata"]
    assert info.tokens is None
    assert info.accounting.adds_up
    for cache, taken in zip(vkv.load(tmp_path / "a.vkv").cache, layers, strict=True):
        check_same(snapshot(cache), visible(taken))


def loads_rightly(record):
    """Whether mlx-lm itself reads its own file back as it was."""
    if record["class"] == "CacheList":
        return all(map(loads_rightly, record["children"]))
    if record["class"] == "ConcatenateKVCache":
        return record["positions"] != []  # 0.32 cannot load it
    front = record["class"] == "ChunkedKVCache" and record["scalars"]["start"] > 0
    return INSTALLED != "0.31" or not front  # it takes the rows for the offset


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if c["mlx_lm"].startswith(INSTALLED) and all(map(loads_rightly, c["layers"]))
    ],
    ids=lambda c: c["id"],
)
def test_equals_what_mlx_lm_loads(case):
    layers, _ = mlx_lm_files.read(case["path"])
    theirs = load_prompt_cache(str(case["path"]))
    for taken, cache in zip(layers, theirs, strict=True):
        check_same(taken, snapshot(cache))


def fixture(name):
    return FIXTURES / f"{name}.safetensors"


def test_padding_is_left_behind(tmp_path):
    info = vkv.convert(fixture("0.32/kv-3-of-256"), tmp_path / "a.vkv")
    assert info.accounting.roles["payload"] == 2 * 3 * 2 * 2


@pytest.mark.parametrize("name", ["0.31/mixed", "0.32/mixed", "0.32/kv-3-of-256"])
def test_in_place(name, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(fixture(name).read_bytes())
    first = vkv.convert(path, tmp_path / "b.vkv")
    assert vkv.convert(path, path).id == first.id  # from mlx-lm's file
    assert vkv.convert(path, path).id == first.id  # from its own
    assert vkv.validate(path, deep=True).ok
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.vkv"]


def test_works_without_mlx_lm(tmp_path):
    code = (
        "import sys; sys.modules['mlx_lm'] = None; import vkv; "
        f"print(vkv.convert({str(fixture('0.31/mixed'))!r}, 'a.vkv').size)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (tmp_path / "a.vkv").stat().st_size


def test_options(tmp_path):
    seen = []
    info = vkv.convert(
        fixture("0.31/kv-3-of-256"),
        tmp_path / "a.vkv",
        metadata={"model": "mine", "more": "text"},
        created="2026-01-01",
        tokens=[7, 8, 9],
        progress=lambda done, total: seen.append((done, total)),
        durable=False,
    )
    assert info.metadata == {"model": "mine", "more": "text"}
    assert (info.header.created, info.tokens) == ("2026-01-01", 3)
    assert vkv.load(tmp_path / "a.vkv").tokens == [7, 8, 9]
    assert seen[-1] == (36, 36)


# ---- vkv files


def ones(*shape, dtype=mx.float16):
    return mx.ones(shape, dtype)


def cache_of(tokens=70, layers=2):
    caches = [KVCache() for _ in range(layers)]
    for i, cache in enumerate(caches):
        fed = [mx.random.normal((1, 2, tokens, 64), key=mx.random.key(2 * i + j)) for j in (0, 1)]
        cache.update_and_fetch(*(x.astype(mx.float16) for x in fed))
    return caches


def saved(tmp_path, **options):
    options = {"tokens": range(70), "metadata": {"a": "b"}, "created": "then"} | options
    return vkv.save(tmp_path / "a.vkv", cache_of(), **options)


def test_another_codec(tmp_path):
    info = saved(tmp_path)
    small = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", codec="affine:bits=4")
    direct = vkv.save(
        tmp_path / "c.vkv",
        cache_of(),
        tokens=range(70),
        metadata={"a": "b"},
        created="then",
        codec="affine:bits=4",
    )
    assert small.id == direct.id
    back = vkv.convert(tmp_path / "b.vkv", tmp_path / "d.vkv")
    assert (back.size, back.header.created, back.metadata) == (info.size, "then", {"a": "b"})
    assert vkv.load(tmp_path / "d.vkv").tokens == list(range(70))
    for a, b in zip(
        vkv.load(tmp_path / "b.vkv").cache, vkv.load(tmp_path / "d.vkv").cache, strict=True
    ):
        assert same_bits(a.keys, b.keys)
        assert same_bits(a.values, b.values)


def test_a_lossy_file_is_encoded_anew(tmp_path):
    saved(tmp_path, codec="affine:bits=4")
    info = vkv.convert(tmp_path / "a.vkv", tmp_path / "a.vkv", codec="affine:bits=8")
    codecs = {
        s.params["bits"]
        for layer in info.header.layers
        for t in layer.tensors.values()
        for s in t.segments
    }
    assert codecs == {8}


def test_options_win_over_the_file(tmp_path):
    saved(tmp_path)
    info = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", metadata={"c": "d"}, created="now")
    assert (info.metadata, info.header.created) == ({"a": "b", "c": "d"}, "now")


def test_tokens_are_added_or_must_agree(tmp_path):
    saved(tmp_path, tokens=None)
    info = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", tokens=range(70))
    assert info.tokens == 70
    assert vkv.convert(tmp_path / "b.vkv", tmp_path / "c.vkv", tokens=range(70)).id == info.id
    with pytest.raises(MismatchError, match="tokens given"):
        vkv.convert(tmp_path / "b.vkv", tmp_path / "c.vkv", tokens=range(1, 71))


def test_codes_of_a_quantized_cache_stay(tmp_path):
    cache = QuantizedKVCache(group_size=32, bits=4)
    cache.update_and_fetch(ones(1, 1, 3, 64), ones(1, 1, 3, 32))
    first = vkv.save(tmp_path / "a.vkv", [cache, CacheList(cache)])
    info = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv")
    assert info.id == first.id
    noted = vkv.convert(tmp_path / "a.vkv", tmp_path / "c.vkv", codec="affine:bits=2")
    check_same(snapshot(vkv.load(tmp_path / "c.vkv").cache[0]), snapshot(cache))
    assert not noted.notes or "the codes the cache holds" in noted.notes[0]


def test_a_damaged_vkv_file_is_refused(tmp_path):
    saved(tmp_path)
    raw = bytearray((tmp_path / "a.vkv").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a.vkv").write_bytes(raw)
    with pytest.raises(VkvError, match="D1"):
        vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv")
    assert os.listdir(tmp_path) == ["a.vkv"]


# ---- whose cache it is


def tiny(layers=2, seed=0):
    """A random llama of two heads."""
    mx.random.seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
    args = llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=layers,
        rms_norm_eps=1e-5,
        vocab_size=97,
        rope_theta=10000.0,
        **sizes,
    )
    return llama.Model(args)


def prefilled(model, tmp_path, tokens):
    """A prompt cache file of mlx-lm, and the cache in it."""
    cache = [KVCache() for _ in model.layers]
    mx.eval(model(mx.array(tokens)[None], cache=cache))
    save_prompt_cache(str(tmp_path / "old.safetensors"), cache, {"model": "tiny"})
    return cache


def test_the_model_is_recorded_and_checked(tmp_path):
    model, tokens = tiny(), list(range(1, 65))
    cache = prefilled(model, tmp_path, tokens)
    new = tmp_path / "new.vkv"
    info = vkv.convert(tmp_path / "old.safetensors", new, model=model, tokens=tokens)
    direct = vkv.save(
        tmp_path / "b.vkv", cache, model=model, tokens=tokens, metadata={"model": "tiny"}
    )
    assert info.id == direct.id
    assert vkv.load(new, model=model).tokens == tokens
    prefilled(tiny(layers=1), tmp_path, tokens)
    with pytest.raises(MismatchError, match="1 layers in the file, 2 in the model's cache"):
        vkv.convert(tmp_path / "old.safetensors", tmp_path / "c.vkv", model=model)
    with pytest.raises(MismatchError):
        vkv.convert(new, tmp_path / "c.vkv", model=tiny(seed=1))
    again = vkv.convert(new, tmp_path / "c.vkv", codec="affine:bits=4", model=model)
    assert (again.header.model, again.header.ropes) == (info.header.model, info.header.ropes)


def test_the_model_is_added_to_a_file_without(tmp_path):
    model, tokens = tiny(), list(range(1, 65))
    prefilled(model, tmp_path, tokens)
    bare = vkv.convert(tmp_path / "old.safetensors", tmp_path / "a.vkv")
    assert bare.header.model is None
    info = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv", model=model, tokens=tokens)
    assert vkv.load(tmp_path / "b.vkv", model=model).info.id == info.id


def test_rotated_keys_are_known_without_the_model(tmp_path):
    model, tokens = tiny(), [i % 97 for i in range(128)]
    cache = prefilled(model, tmp_path, tokens)
    options = {"codec": "nsnquant:bits=2", "tokens": tokens}
    vkv.convert(tmp_path / "old.safetensors", tmp_path / "a.vkv", model=model, **options)
    head = vkv.inspect(tmp_path / "a.vkv").header
    assert head.needs == ("rope",)
    back = vkv.convert(tmp_path / "a.vkv", tmp_path / "b.vkv")
    assert (back.header.needs, back.header.ropes) == ((), head.ropes)
    for a, b, true in zip(
        vkv.load(tmp_path / "a.vkv").cache, vkv.load(tmp_path / "b.vkv").cache, cache, strict=True
    ):
        assert same_bits(a.keys, b.keys)
        wrong = mx.linalg.norm(a.keys - true.keys[..., :128, :])
        assert wrong < 0.5 * mx.linalg.norm(true.keys)
    vkv.save(tmp_path / "d.vkv", vkv.load(tmp_path / "a.vkv").cache)  # codes kept, model unknown
    for source in ("a.vkv", "d.vkv"):
        again = vkv.convert(tmp_path / source, tmp_path / "c.vkv", codec="nsnquant:bits=2")
        assert again.header.needs == ("rope",)


def test_inline_takes_what_does_not_change_the_bytes_and_refuses_the_rest(tmp_path):
    src, dst = tmp_path / "a.vkv", tmp_path / "b.vkv"
    vkv.save(src, [KVCache()], metadata={"a": "1", "b": "1"}, created="2026-01-01T00:00:00Z")
    info = vkv.convert(src, dst, inline=True, metadata={"b": "2"}, created="2026-02-02T00:00:00Z")
    assert info.header.metadata == {"a": "1", "b": "2"}
    assert info.header.created == "2026-02-02T00:00:00Z"
    for name, value in {"codec": "raw", "tokens": [1], "basis": src}.items():
        with pytest.raises(VkvError, match=f"{name}= has no effect"):
            vkv.convert(src, dst, inline=True, **{name: value})
