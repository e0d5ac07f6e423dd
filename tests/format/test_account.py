"""The byte account: every byte once, and the same as counted by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vkv
from vkv.format import file_id, framing, header
from vkv.format.account import ROWS, account
from vkv.format.document import Document
from vkv.format.info import of_document
from vkv.format.layer_summary import describe
from vkv.format.schema import Header, Layer, Segment, Stored, Tensor, Tokens
from vkv.sources.local import FileSource

GOOD = sorted((Path(__file__).parents[2] / "fixtures" / "v1" / "good").glob("*.vkv"))


def fixture(name: str) -> vkv.Info:
    return vkv.inspect(next(p for p in GOOD if p.stem == name))


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.stem)
def test_every_byte_once(path):
    found = vkv.inspect(path).accounting
    assert found.adds_up
    assert tuple(found.roles) == ROWS
    assert sum(found.roles.values()) == found.size == path.stat().st_size
    parts = sum(group.bytes for group in found.groups.values()) + found.shared
    assert parts == found.size - found.roles["header"] - found.roles["tokens"]
    assert all(sum(g.roles.values()) == g.bytes for g in found.groups.values())
    assert sum(g.elements for g in found.groups.values()) == found.elements


def test_raw_by_hand():
    """Two layers of keys and values (1, 2, 3, 8) in F16, three ids."""
    found = fixture("raw-kv-f16").accounting
    assert found.roles["payload"] == 2 * 2 * 48 * 2
    assert found.roles["tokens"] == 12
    assert found.groups["keys"].elements == 2 * 48
    assert found.groups["keys"].bits == 16.0
    assert found.elements == 192
    assert found.bits == 8 * found.size / 192
    assert found.ratio == 2 * 192 / found.size


def test_affine_by_hand():
    """Keys and values (1, 2, 3, 64): 4 bits and two F16 per 64."""
    found = fixture("affine-4bit-group64-f16").accounting
    assert found.roles["payload"] == 2 * 6 * 32
    assert found.roles["metadata"] == 2 * 6 * 4
    assert {g.bits for g in found.groups.values()} == {4.5}


def test_segments_by_hand():
    """Eight rows of 32: one F16 sink, 4 + 2 rows of 4 and 8 bits, one F16 residual."""
    found = fixture("rope-segments").accounting
    codes, groups = 4 * 16 + 2 * 32, 6 * 4
    assert found.groups["keys"].roles == {
        "payload": codes, "metadata": groups, "sink": 64, "residual": 64
    }  # fmt: skip
    assert found.groups["keys"].elements == 256


def test_shared_bytes_belong_to_no_group():
    found = fixture("table-shared").accounting
    assert found.shared == found.roles["table"] == 24
    assert [g.bytes for g in found.groups.values()] == [0, 0]


def test_empty_files_have_no_ratio_to_speak_of():
    found = fixture("raw-no-layers").accounting
    assert (found.elements, found.bits, found.ratio) == (0, 0.0, 0.0)
    assert found.roles["header"] == found.size


def test_rows_collapse_equal_layers_and_tell_notes():
    info = fixture("affine-refused")
    assert "not a multiple of group 64" in info.notes[0]
    mixed = fixture("raw-mixed").to_dict()["layers"]
    assert [row["kind"] for row in mixed] == ["kv", "arrays", "rotating"]
    same = fixture("raw-kv-f16").to_dict()["layers"]
    assert [(row["layers"], row["kind"]) for row in same] == [("0-1", "kv")]


def test_json_is_plain_and_complete():
    for path in GOOD:
        out = json.loads(json.dumps(vkv.inspect(path).to_dict()))
        assert out["schema_version"] == 1
        assert out["accounting"]["adds_up"] is True
        assert sum(out["accounting"]["roles"].values()) == out["size"]


def test_segments_are_described():
    info = fixture("rope-segments")
    keys = info.header.layers[0].tensors["keys"]
    assert describe(keys) == (
        "F16 (1, 1, 8, 32): raw 1 + affine:bits=4,group=32,scale=F16 4 + "
        "affine:bits=8,group=32,scale=F16 2 + raw 1"
    )


class Counting(FileSource):
    """Counts the bytes that are read."""

    count = 0

    def readinto(self, start: int, buffer: memoryview) -> None:
        self.count += len(buffer)
        super().readinto(start, buffer)


LAYERS, TOKENS, HEADS, DIM, GROUP = 32, 131_072, 8, 128, 64


def large(path: Path) -> None:
    """A file of 131,072 tokens of an 8B model, 4 bits; its data is a hole of the disk."""
    shape = (1, HEADS, TOKENS, DIM)
    forms = {"codes": ("payload", "U32", DIM // 8), "scales": ("metadata", "F16", DIM // GROUP),
             "biases": ("metadata", "F16", DIM // GROUP)}  # fmt: skip
    params = {"bits": 4, "group": GROUP, "scale": "F16"}
    stored = {
        f"layers.{i}.{name}.0.{part}": Stored(
            role=role, dtype=dtype, shape=(*shape[:3], width), digest=bytes(32)
        )
        for i in range(LAYERS)
        for name in ("keys", "values")
        for part, (role, dtype, width) in forms.items()
    }
    stored["vkv.tokens"] = Stored(role="tokens", dtype="U32", shape=(TOKENS,), digest=bytes(32))
    layers = []
    for i in range(LAYERS):
        tensors = {}
        for name in ("keys", "values"):
            parts = {part: f"layers.{i}.{name}.0.{part}" for part in forms}
            run = Segment(codec="affine", version=1, params=params, tokens=TOKENS, parts=parts)
            tensors[name] = Tensor(dtype="F16", shape=shape, segments=(run,))
        layers.append(Layer(kind="kv", scalars={"offset": TOKENS}, tensors=tensors))
    head = Header(
        version="1.0", producer="test", layers=tuple(layers), tensors=stored,
        tokens=Tokens(count=TOKENS, digest=bytes(32), tensor="vkv.tokens"),
    )  # fmt: skip
    raw = header.dump(head)
    frame = framing.frame(
        header.VERSION,
        file_id.of_header(raw),
        [(framing.HEADER, "U8", (len(raw),))]
        + [(name, t.dtype, t.shape) for name, t in stored.items()],
    )
    path.write_bytes(frame + raw)
    os.truncate(path, len(frame) + len(raw) + sum(t.nbytes for t in stored.values()))


def test_inspecting_a_large_file_reads_little_of_it(tmp_path):
    large(tmp_path / "large.vkv")
    source = Counting(tmp_path / "large.vkv")
    with Document(source) as document:
        found = account(document)
        info = of_document(document)
    assert source.count < 150_000
    elements = 2 * LAYERS * HEADS * TOKENS * DIM
    assert found.size == source.size > 4.5 * elements / 8
    assert found.roles["payload"] == elements // 2
    assert found.roles["metadata"] == elements // GROUP * 4
    assert found.roles["tokens"] == 4 * TOKENS
    assert found.roles["header"] < 100_000
    assert found.adds_up
    assert {g.bits for g in found.groups.values()} == {4.5}
    assert info.to_dict()["tokens"] == TOKENS


def test_inspecting_imports_little(tmp_path):
    """In a fresh process; what is slow to import stays out."""
    large(tmp_path / "large.vkv")
    code = """if True:
        import sys
        import vkv
        info = vkv.inspect(sys.argv[1])
        assert info.accounting.adds_up and info.tokens == 131072
        heavy = {"mlx", "mlx_lm", "numpy", "transformers", "safetensors", "rich", "click"}
        assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "large.vkv"], check=True)
