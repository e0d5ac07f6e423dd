"""Load an open file; progress counts every layer; deferred digest checks end with the load."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import vkv
from fixtures.models import tiny
from vkv import identity
from vkv.arrays.cache_file import open_file
from vkv.caches.loading.load import load_file
from vkv.codecs.tc import blocks
from vkv.errors import DigestError, MismatchError


def saved(path, name="llama", tokens=100, **options):
    model = tiny.MODELS[name](**({"head_dim": 64} if name == "llama" else {}))
    ids = [(37 * i + 11) % tiny.VOCAB for i in range(tokens)]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    vkv.save(path, cache, tokens=ids, model=model, **options)
    return model


@pytest.mark.parametrize("live", ["dense", "packed"])
@pytest.mark.parametrize("codec", ["raw", "affine:bits=4"])
def test_progress_counts_every_layer(codec, live, tmp_path):
    saved(tmp_path / "a.vkv", codec=codec)
    reports = []
    vkv.load(tmp_path / "a.vkv", live=live, progress=lambda *report: reports.append(report))
    stored = vkv.inspect(tmp_path / "a.vkv").header.tensors.values()
    total = sum(t.nbytes for t in stored) - 4 * 100  # the token ids are no layer's
    assert len(reports) == len(vkv.inspect(tmp_path / "a.vkv").header.layers)
    assert [all_ for _, all_ in reports] == [total] * len(reports)
    done = [done for done, _ in reports]
    assert done == sorted(done)
    assert done[-1] == total


def test_progress_counts_checkpoints(tmp_path):
    model = tiny.MODELS["lfm2"]()
    prompt = vkv.prefill(model, [(37 * i + 11) % tiny.VOCAB for i in range(40)], checkpoints=[20])
    vkv.save(tmp_path / "a.vkv", prompt, model=model)
    head, reports = vkv.inspect(tmp_path / "a.vkv").header, []
    vkv.load(tmp_path / "a.vkv", progress=lambda *report: reports.append(report))
    total = sum(t.nbytes for t in head.tensors.values()) - 4 * 40
    assert len(reports) == len(head.layers) + sum(len(c.layers) for c in head.checkpoints)
    assert {all_ for _, all_ in reports} == {total}
    assert reports[len(head.layers) - 1][0] < reports[-1][0] == total


def test_a_known_identity_is_not_computed_again(tmp_path, monkeypatch):
    model = saved(tmp_path / "a.vkv")
    known = identity.of_model(model)
    monkeypatch.setattr(identity, "of_model", None)
    with open_file(tmp_path / "a.vkv") as file:
        prompt = load_file(file, model=model, known=known)
    assert len(prompt.tokens or ()) == 100


def test_a_known_identity_of_another_model_is_refused(tmp_path):
    saved(tmp_path / "a.vkv")
    other = tiny.llama(seed=1, head_dim=64)
    with open_file(tmp_path / "a.vkv") as file, pytest.raises(MismatchError):
        load_file(file, model=other, known=identity.of_model(other))


@pytest.mark.parametrize("live", ["dense", "packed"])
def test_a_changed_byte_of_a_raw_tensor_is_found_before_the_caches_are_returned(live, tmp_path):
    saved(tmp_path / "a.vkv")
    with open_file(tmp_path / "a.vkv") as file:
        at = file.document.entries["layers.1.values.0.data"].start
    data = bytearray((tmp_path / "a.vkv").read_bytes())
    data[at] ^= 1
    (tmp_path / "b.vkv").write_bytes(data)
    with pytest.raises(DigestError):
        vkv.load(tmp_path / "b.vkv", live=live)
    assert vkv.load(tmp_path / "b.vkv", live=live, verify=False).cache


def test_tc_reads_the_blocks_of_each_tensor_once(tmp_path, monkeypatch):
    saved(tmp_path / "a.vkv", codec="tc:step=0.5")
    tensors = [t for layer in vkv.inspect(tmp_path / "a.vkv").header.layers
               for t in layer.tensors.values()]  # fmt: skip
    reads, read = [], blocks.read
    monkeypatch.setattr(blocks, "read", lambda *args: reads.append(1) or read(*args))
    vkv.load(tmp_path / "a.vkv")
    assert len(reads) == len(tensors)


@pytest.mark.parametrize(
    ("name", "text"),
    [("gemma3_text", "max_size 16 in the file, 8 in the model"),
     ("llama4", r"chunk_size \d+ in the file, 8 in the model")],
)  # fmt: skip
def test_numbers_that_the_model_fixes_are_compared(name, text, tmp_path):
    saved(tmp_path / "a.vkv", name, 10)
    small = {"gemma3_text": {"window": 8}, "llama4": {"chunk": 8}}[name]
    with open_file(tmp_path / "a.vkv") as file:
        known = file.header.model, file.header.ropes  # so that the caches are what differs
        model = tiny.MODELS[name](**small)
        with pytest.raises(MismatchError, match=text):
            load_file(file, model=model, known=known)
