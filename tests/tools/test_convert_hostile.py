"""``vkv.convert`` on files of mlx-lm that are broken, inconsistent or hostile."""

from __future__ import annotations

import contextlib
import json
import os
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache, save_prompt_cache

import vkv
from vkv.errors import CacheError, CodecError, ContainerError, VkvError
from vkv.interop import files as mlx_lm_files

pytestmark = pytest.mark.hostile

FIXTURES = Path(__file__).parents[2] / "fixtures" / "mlx_lm"


def fixture(name):
    return FIXTURES / f"{name}.safetensors"


def edited(tmp_path, name, edit):
    """A fixture whose arrays and metadata went through ``edit(arrays, metadata)``."""
    arrays, metadata = mx.load(str(fixture(name)), return_metadata=True)
    edit(arrays, metadata)
    path = tmp_path / "bad.safetensors"
    mx.save_safetensors(str(path), arrays, metadata)
    return path


def put(target, **changes):
    """An edit that sets (or, with ``None``, drops) names; ``_`` in a name stands for a dot."""

    def edit(arrays, metadata):
        where = {"arrays": arrays, "metadata": metadata}[target]
        for name, value in changes.items():
            name = name.removeprefix("n").replace("_", ".")
            where.pop(name, None)
            if value is not None:
                where[name] = value

    return edit


def texts(**changes):
    return put("metadata", **changes)


def data(**changes):
    return put("arrays", **changes)


def ones(*shape, dtype=mx.float16):
    return mx.ones(shape, dtype)


BAD = [
    ("0.31/kv-3-of-256", texts(n2_0="VeloxKVCache"), "L1"),
    ("0.31/kv-3-of-256", texts(n2_0="BatchKVCache"), "L1"),
    ("0.31/kv-3-of-256", texts(n2_0="save_prompt_cache"), "L1"),
    ("0.31/kv-3-of-256", texts(n2_0="x" * 100_000), "L1"),
    ("0.32/kv-3-of-256", texts(n1_0="__import__"), "L1"),
    ("0.32/list", data(n0_0_1=mx.array([ord(c) for c in "EvilCache"])), "L1"),
    ("0.31/list", texts(n0_0_0_1="EvilCache"), "L1"),
    ("0.31/kv-3-of-256", texts(n0_0=None, n0_0_0="3"), "L3"),
    ("0.31/rotating-below", texts(n0_0_2=None), "L4"),
    ("0.31/rotating-below", texts(n0_0_3=None), "L3"),
    ("0.31/rotating-below", texts(n0_0_1="1e3"), "L3"),
    ("0.31/rotating-below", texts(n0_0_1="-8"), "L3"),
    ("0.31/rotating-below", texts(n0_0_1="８"), "L3"),
    ("0.31/rotating-below", texts(n0_0_1="9" * 5000), "L3"),
    ("0.31/rotating-below", texts(n0_0_1="None"), "L3"),
    ("0.31/rotating-below", texts(n0_0_3="7"), "L5"),
    ("0.31/rotating-below", texts(n0_0_2="2"), "L5"),
    ("0.31/rotating-past", texts(n0_1_0="9"), "L5"),
    ("0.31/chunked-front", texts(n0_0_1="x"), "L3"),
    ("0.31/chunked-front", data(n0_0=ones(1, 1, 3, 2) * 0, n0_1=ones(1, 1, 3, 2) * 0), "L5"),
    ("0.31/quantized", texts(n0_0_2="7"), "A1"),
    ("0.31/quantized", texts(n0_0_1="48"), "A1"),
    ("0.31/quantized", texts(n0_0_2="8"), "K3"),
    ("0.31/quantized", texts(n0_0_0="4"), "L5"),
    ("0.31/quantized", data(n0_0_2=None), "L4"),
    ("0.31/quantized", data(n0_0_0=ones(1, 1, 3, 8)), "K3"),
    ("0.31/quantized", data(n0_0_1=mx.ones((1, 1, 3, 2), mx.int32)), "A1"),
    ("0.31/list", texts(n0_0_0_1=None), "L4"),
    ("0.31/list", texts(n0_1_1_1=None), "L4"),
    ("0.31/list", texts(n0_0_0_0=None, n0_0_0_1=None, n0_0_0="KVCache"), "L4"),
    ("0.31/kv-3-of-256", data(n0_1=None), "L4"),
    ("0.31/kv-3-of-256", data(n0_2=ones(1)), "L4"),
    ("0.31/kv-3-of-256", data(n1_0=ones(1)), "L4"),
    ("0.31/kv-3-of-256", texts(n2_1="KVCache"), "L4"),
    ("0.31/kv-3-of-256", texts(n2_1_0="KVCache"), "L1"),
    ("0.31/kv-3-of-256", texts(n2_00="KVCache"), "L4"),
    ("0.31/kv-3-of-256", data(n0_0=ones(1, 3, 2)), "L4"),
    ("0.31/kv-3-of-256", data(n0_0=ones(1, 2, 3, 2)), "L4"),
    ("0.31/kv-3-of-256", data(n0_0=ones(1, 1, 4, 2)), "L4"),
    ("0.31/kv-3-of-256", data(n0_0_0_0_0_0_0_0_0_0_0_0_0_0_0_0_0_0_0_0=ones(1)), "L4"),
    ("0.31/arrays", data(**{f"n0_{i}": ones(1) for i in range(65)}), "L3"),
    ("0.31/arrays", data(n0_0=None), "L4"),
    ("0.31/arrays", data(n0_0=None, n0_0_0=ones(1)), "L4"),
    ("0.32/kv-3-of-256", data(n0_2=mx.array(257)), "L5"),
    ("0.32/kv-3-of-256", data(n0_2=mx.array(-1)), "L5"),
    ("0.32/kv-3-of-256", data(n0_2=mx.array(3.0)), "L3"),
    ("0.32/kv-3-of-256", data(n0_2=mx.array([3])), "L3"),
    ("0.32/kv-3-of-256", data(n0_2=mx.array(True)), "L3"),
    ("0.32/kv-3-of-256", data(n0_2=None), "L4"),
    ("0.32/kv-3-of-256", texts(n2_1_1="none"), "L3"),
    ("0.32/kv-3-of-256", texts(n2_1_1="pickle"), "L3"),
    ("0.32/kv-3-of-256", texts(n2_1_1="string"), "L3"),
    ("0.32/kv-3-of-256", texts(n2_1_1=None), "L4"),
    ("0.32/kv-3-of-256", texts(n2_1_0="0.9"), "L4"),
    ("0.32/kv-3-of-256", texts(n2_2_0="0.2", n2_2_1="scalar"), "L4"),
    ("0.32/kv-3-of-256", texts(n2_2_0="0.1", n2_2_1="none"), "L4"),
    ("0.32/kv-3-of-256", texts(n2_2_0="0.0", n2_2_1="none", n2_3_0="0.1", n2_3_1="none"), "L5"),
    ("0.32/kv-3-of-256", texts(n1_0=None), "L4"),
    ("0.32/list", data(n0_0_1=mx.array([300] * 7)), "L1"),
    ("0.32/list", data(n0_0_1=mx.array([75] * 5000)), "L3"),
    ("0.32/list", data(n0_0_1=ones(3)), "L3"),
    ("0.32/arrays-slots", texts(n2_1_1="scalar"), "L3"),
    ("0.32/rotating-at", data(n0_5=mx.array(7)), "L5"),
    ("0.32/chunked-front", data(n0_4=mx.array(13)), "L5"),
    ("0.31/kv-3-of-256", texts(n1_note="x" * 1_200_000), "H5"),
    ("0.31/kv-3-of-256", texts(n1_note="x" * 2_200_000), "C2"),
    ("0.31/kv-3-of-256", texts(n2_0=None), "C8"),
]


@pytest.mark.parametrize(
    ("name", "edit", "rule"), BAD, ids=[f"{i}-{c[2]}" for i, c in enumerate(BAD)]
)
def test_inconsistent_files_are_refused(name, edit, rule, tmp_path):
    target = tmp_path / "a.vkv"
    target.write_bytes(b"before")
    path = edited(tmp_path, name, edit)
    with pytest.raises(VkvError) as caught:
        vkv.convert(path, target)
    assert caught.value.rule == rule, str(caught.value)
    assert len(str(caught.value)) < 600
    assert target.read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path)) == ["a.vkv", "bad.safetensors"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ChunkedKVCache", [1, 1, (1 << 31) - 1, 0]),
        ("ArraysCache", [(1 << 31) - 1, 0, (1 << 31) - 1]),
        ("ArraysCache", [1 << 40, 0]),
        ("ArraysCache", [1] * 9),
    ],
)
def test_forms_without_bytes_are_bounded(name, shape, tmp_path):
    form = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * prod(shape)]}
    text = json.dumps({"__metadata__": {"2.0": name}, "0.0": form})
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4 * prod(shape)))
    with pytest.raises(ContainerError, match=r"a.safetensors: 0.0: MLX has no array"):
        vkv.convert(path, tmp_path / "b.vkv")


def test_deep_nesting_is_refused(tmp_path):
    cache = KVCache()
    cache.update_and_fetch(ones(1, 1, 1, 2), ones(1, 1, 1, 2))
    for depth in range(1, 6):
        cache = CacheList(cache)
        save_prompt_cache(str(tmp_path / f"{depth}.safetensors"), [cache])
    assert vkv.convert(tmp_path / "4.safetensors", tmp_path / "4.vkv").size
    with pytest.raises(CacheError, match=r"nested deeper than 4 \[L3\]"):
        vkv.convert(tmp_path / "5.safetensors", tmp_path / "5.vkv")


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"", "C1"),
        (b"GGUF" + bytes(100), "C2"),
        (safetensors.numpy.save({"a": np.ones(3, np.float32)}), "C8"),
        (safetensors.numpy.save({"0.0": np.ones(3)}, {"2.0": "KVCache", "0.0": ""}), "C3"),
        (fixture("0.31/mixed").read_bytes()[:-1], "C3"),
        (fixture("0.31/mixed").read_bytes() + b"\0", "C3"),
        (fixture("0.31/kv-3-of-256").read_bytes().replace(b"12,24]", b"10,22]"), "C3"),
    ],
    ids=range(7),
)
def test_other_files_are_refused(raw, rule, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(raw)
    with pytest.raises(VkvError) as caught:
        vkv.convert(path, tmp_path / "b.vkv")
    assert caught.value.rule == rule, str(caught.value)
    assert not (tmp_path / "b.vkv").exists()


def test_errors_of_the_file_system_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        vkv.convert(tmp_path / "none", tmp_path / "b.vkv")
    with pytest.raises(FileNotFoundError):
        vkv.convert(fixture("0.31/kv-3-of-256"), tmp_path / "none" / "b.vkv")
    with pytest.raises(VkvError, match="unsupported codec 'zip'"):
        vkv.convert(tmp_path / "none", tmp_path / "b.vkv", codec="zip")


def test_tokens_of_another_number_are_refused(tmp_path):
    with pytest.raises(CacheError, match=r"L6"):
        vkv.convert(fixture("0.31/kv-3-of-256"), tmp_path / "a.vkv", tokens=range(5))
    assert os.listdir(tmp_path) == []


VALUES = st.one_of(
    st.sampled_from(["", "0", "1", "3", "9999", "-1", "None", "none", "scalar", "string"]),
    st.sampled_from(["0.0", "0.2", "1.0.0", "KVCache", "CacheList", "ArraysCache", "2.0"]),
    st.text(max_size=8),
)
NAMES = st.one_of(
    st.lists(st.integers(0, 3).map(str), min_size=1, max_size=6).map(".".join), st.text(max_size=6)
)
SEEDS = [
    fixture(n)
    for n in ("0.31/mixed", "0.31/list", "0.31/quantized", "0.32/mixed", "0.32/list", "0.32/empty")
]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_metadata_raises_only_vkv_errors(tmp_path_factory, data):
    home = tmp_path_factory.getbasetemp()
    raw = data.draw(st.sampled_from(SEEDS)).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    metadata = table["__metadata__"]
    for name in data.draw(st.lists(st.sampled_from(sorted(metadata)), max_size=3)):
        metadata.pop(name, None)
        if data.draw(st.booleans()):
            metadata[name] = data.draw(VALUES)
    metadata |= data.draw(st.dictionaries(NAMES, VALUES, max_size=2))
    for name in data.draw(
        st.lists(st.sampled_from(sorted(table.keys() - {"__metadata__"})), max_size=2)
    ):
        new = data.draw(NAMES)
        if name in table and new not in table:
            table[new] = table.pop(name)
    text = json.dumps(table).encode()
    path = home / "mutated.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with contextlib.suppress(VkvError):
        vkv.convert(path, home / "mutated.vkv", durable=False)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SEEDS), st.floats(0, 1), st.binary(max_size=4), st.integers(0, 4))
def test_mutated_bytes_raise_only_vkv_errors(tmp_path_factory, seed, where, insert, drop):
    home = tmp_path_factory.getbasetemp()
    raw = seed.read_bytes()
    at = int(where * len(raw))
    path = home / "mutated.safetensors"
    path.write_bytes(raw[:at] + insert + raw[at + drop :])
    with contextlib.suppress(VkvError):
        vkv.convert(path, home / "mutated.vkv", durable=False)


def test_a_pipe_is_refused_at_once(tmp_path):
    """Its name may have been that of a file when it was looked at."""
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ContainerError, match=r"not a regular file \[C1\]"):
        mlx_lm_files.read(tmp_path / "a")


def test_a_file_that_changes_while_it_is_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    mx.save_safetensors(
        str(path), {"0.0": ones(1, 1, 3, 4), "0.1": ones(1, 1, 3, 4)}, {"2.0": "KVCache", "0.0": ""}
    )
    raw = path.read_bytes()

    @contextlib.contextmanager
    def opened(name, **options):
        with safetensors.safe_open(name, **options) as file:
            yield file
        with path.open("r+b") as out:
            out.write(raw.replace(b"[1,1,3,4]", b"[1,1,4,3]"))

    monkeypatch.setattr(mlx_lm_files, "safe_open", opened)
    with pytest.raises(ContainerError) as caught:
        vkv.convert(path, tmp_path / "b.vkv")
    assert caught.value.rule == "C1"
    assert not (tmp_path / "b.vkv").exists()


def test_a_file_cut_while_it_is_converted(tmp_path):
    path = tmp_path / "a.safetensors"
    mx.save_safetensors(
        str(path),
        {"0.0": ones(1, 1, 300, 64), "0.1": ones(1, 1, 300, 64)},
        {"2.0": "KVCache", "0.0": ""},
    )
    with pytest.raises(ContainerError, match=r"cannot be read: .* \[C1\]"):
        vkv.convert(path, tmp_path / "b.vkv", progress=lambda *_: os.truncate(path, 600))
    assert not (tmp_path / "b.vkv").exists()


def test_codes_that_no_reader_takes(tmp_path):
    """mlx-lm quantizes infinite keys without a word; a file of them would not load."""
    cache = KVCache()
    cache.update_and_fetch(ones(1, 1, 3, 64) * mx.inf, ones(1, 1, 3, 64))
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache.to_quantized()])
    with pytest.raises(CodecError) as caught:
        vkv.convert(tmp_path / "a.safetensors", tmp_path / "b.vkv")
    assert caught.value.rule == "A3"
    assert str(caught.value.at).startswith("layers[0].keys")
    assert not (tmp_path / "b.vkv").exists()
