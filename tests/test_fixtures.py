"""The files of ``fixtures/v1`` against this reader and against ``tests/reference/file.py``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from blake3 import blake3

import vkv
from tests.reference import file as reference
from vkv import errors
from vkv.arrays.cache_file import CacheFile, open_file
from vkv.caches.loading.decode import decode
from vkv.codecs import registry
from vkv.format import container_write, framing, header
from vkv.format.document import open_document
from vkv.format.layers import stored_layers
from vkv.format.schema import Layer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v1"
CASES: list[dict[str, Any]] = json.loads((FIXTURES / "manifest.json").read_text())["files"]
GOOD = [c for c in CASES if "error" not in c]
BAD = [c for c in CASES if c["file"].startswith("bad/")]
UNKNOWN_CODEC = [c for c in CASES if c.get("error") == "UnknownCodecError"]
#: What good files may stand on, by id.
OTHERS = reference.beside(FIXTURES / "good")
UNSUPPORTED = [c for c in CASES if c.get("error") == "UnsupportedError"]

#: The step between 1 and the next number, of the dtypes that decoding rounds to.
EPSILON = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 2.0**-23}


def each(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c["file"])


def path(case: dict[str, Any]) -> Path:
    return FIXTURES / case["file"]


def numpy(x: mx.array) -> np.ndarray:
    floating = mx.issubdtype(x.dtype, mx.floating)
    return np.array(x.astype(mx.float32) if floating else x)


def test_manifest_lists_every_file():
    found = {str(p.relative_to(FIXTURES)) for p in FIXTURES.rglob("*.vkv")}
    assert found == {c["file"] for c in CASES}


@each(CASES)
def test_bytes_are_frozen(case):
    data = path(case).read_bytes()
    assert hashlib.sha256(data).hexdigest() == case["sha256"]
    assert len(data) < 8192


@each(GOOD)
def test_good_is_sound(case):
    report = vkv.validate(path(case), deep=True)
    assert report.ok, report.findings
    info = vkv.inspect(path(case))
    assert info.accounting.adds_up
    assert info.size == path(case).stat().st_size
    raw, _ = _header(path(case).read_bytes())
    assert info.id == blake3(raw).hexdigest()


@each(GOOD)
def test_good_decodes_as_the_reference_does(case):
    want = reference.read(path(case).read_bytes(), OTHERS)
    with open_file(path(case)) as file:
        assert file.document.tokens() == want.tokens == case["tokens"]
        layers = dict(stored_layers(file.header))
        assert layers.keys() == want.layers.keys() == case["layers"].keys()
        for at, layer in layers.items():
            assert layer.tensors.keys() == want.layers[at].keys()
            for name in layer.tensors:
                _compare(file, layer, name, at, want.layers[at][name])


def _compare(file: CacheFile, layer: Layer, name: str, at: str, want: np.ndarray) -> None:
    tensor = layer.tensors[name]
    got = decode(file, layer, name, at)
    assert got.shape == tensor.shape == want.shape
    if all(registry.is_lossless(s) and s.rope is None for s in tensor.segments):
        np.testing.assert_array_equal(numpy(got), want)
    else:
        stored = [file.header.tensors[n] for s in tensor.segments for n in s.parts.values()]
        step = max(EPSILON.get(dtype, 0) for dtype in (tensor.dtype, *(t.dtype for t in stored)))
        atol = 2 * step * float(np.abs(want).max(initial=0)) + 1e-5
        np.testing.assert_allclose(numpy(got), want, rtol=0, atol=atol)


@each(GOOD)
def test_good_decodes_as_it_did_when_it_was_written(case):
    found = reference.read(path(case).read_bytes(), OTHERS)
    for at, tensors in case["layers"].items():
        for name, want in tensors.items():
            x = found.layers[at][name]
            assert list(x.shape) == want["shape"]
            assert float(x.real.mean()) == pytest.approx(want["mean"], abs=1e-5)
            rms = np.sqrt((np.abs(x).astype(np.float64) ** 2).mean())
            assert float(rms) == pytest.approx(want["rms"], abs=1e-5)


@each([c for c in GOOD if "tables" in c])
def test_tables_are_no_cache(case):
    assert sorted(vkv.inspect(path(case)).header.tables) == case["tables"]
    with pytest.raises(errors.CacheError) as caught:
        vkv.load(path(case))
    assert caught.value.rule == "L9"


@each([c for c in GOOD if "tables" not in c])
def test_good_loads_as_live_caches(case):
    prompt = vkv.load(path(case))
    assert len(prompt.cache) == sum(
        "children" not in at and not at.startswith("checkpoints") for at in case["layers"]
    )
    assert prompt.tokens == case["tokens"]


@each(GOOD)
def test_good_is_a_safetensors_file(case):
    data = path(case).read_bytes()
    with open_document(path(case)) as document:
        for name, tensor in safetensors.deserialize(data):
            entry = document.entries[name]
            assert tuple(tensor["shape"]) == entry.shape
            assert bytes(tensor["data"]) == data[entry.start : entry.stop]


@pytest.mark.parametrize("case", [c for c in GOOD if c["file"].startswith("good/")],
                         ids=lambda c: c["file"])  # fmt: skip
def test_writing_a_good_file_again_gives_its_bytes(case, tmp_path):
    with open_document(path(case)) as document:
        entries = [e for e in document.entries.values() if e.name != framing.HEADER]
        loads = [((e.name, e.dtype, e.shape), lambda n=e.name: document.read(n)) for e in entries]
        head = document.header
        assert not set(head.needs) - header.KNOWN_NEEDS
        with (tmp_path / "again.vkv").open("wb") as out:
            container_write.write(out.fileno(), loads, lambda digests: header.dump(head))
    assert (tmp_path / "again.vkv").read_bytes() == path(case).read_bytes()


@each(BAD)
def test_bad_is_refused_with_its_rule(case):
    with pytest.raises(getattr(errors, case["error"])) as caught:
        vkv.load(path(case))
    assert type(caught.value).__name__ == case["error"]
    assert caught.value.rule == case["rule"] == Path(case["file"]).name.split("-")[0]


@each(BAD)
def test_bad_breaks_that_rule_only(case):
    report = vkv.validate(path(case), deep=True)
    assert [f.rule for f in report.findings if f.severity == "error"] == [case["rule"]]


@each([c for c in BAD if c["rule"][0] in "LKRAD"])
def test_what_only_decoding_refuses_can_be_inspected(case):
    assert vkv.inspect(path(case)).accounting.adds_up


@each(UNKNOWN_CODEC)
def test_unknown_codec_refuses_its_tensor_only(case):
    info = vkv.inspect(path(case))
    assert info.accounting.adds_up
    assert info.accounting.groups["keys"].bytes > 0
    with pytest.raises(errors.UnknownCodecError) as caught:
        vkv.load(path(case))
    assert caught.value.rule == case["rule"]
    assert str(caught.value.at).startswith(case["at"])
    with open_file(path(case)) as file:
        (layer,) = file.header.layers
        assert mx.isfinite(decode(file, layer, "values", "layers[0]")).all()
    report = vkv.validate(path(case), deep=True)
    assert [f.rule for f in report.findings if f.severity == "error"] == ["K1"]


@each(UNSUPPORTED)
def test_what_a_newer_reader_needs_is_refused_whole(case):
    for use in (vkv.inspect, vkv.load):
        with pytest.raises(errors.UnsupportedError) as caught:
            use(path(case))
        assert caught.value.rule == case["rule"]


def test_minor_version_is_read_and_said():
    info = vkv.inspect(FIXTURES / "future" / "minor.vkv")
    assert info.header.version == "1.7"
    assert info.to_dict()["format_version"] == "1.7"


def _header(data: bytes) -> tuple[bytes, int]:
    """The bytes of ``vkv.header`` and where they start."""
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start])
    size = table["vkv.header"]["data_offsets"][1]
    return data[start : start + size], start


@each(GOOD)
def test_the_alignment_that_readers_may_rely_on(case):
    raw, start = _header(path(case).read_bytes())
    assert start % 64 == 0
    assert len(raw) % 64 == 0


@pytest.mark.slow
def test_the_writer_runs_and_has_nothing_left_to_write():
    """A new codec adds its files with it; it never writes one that exists."""
    command = [sys.executable, str(FIXTURES.parent / "write" / "v1.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
