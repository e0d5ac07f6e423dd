"""Files made to harm: only ``VkvError`` comes out, soon, and in little memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgpack
import pytest

import vkv
from tests.helpers.hostile import Draft
from vkv.arrays.cache_file import open_file
from vkv.codecs import registry
from vkv.codecs.raw import Raw
from vkv.errors import CodecError, ContainerError, HeaderError, VkvError
from vkv.format import framing, limits
from vkv.format.document import open_document

ROOT = Path(__file__).parents[1]
GOOD = ROOT / "fixtures" / "v1" / "good"
#: Cases of each of two seeds. ``VKV_HOSTILE_CASES=100000`` looks longer.
CASES = os.environ.get("VKV_HOSTILE_CASES", "10000")


#: Rules that some of the cases break.
RULES = {"C3", "C5", "C6", "C8", "C10", "H1", "H2", "H6", "H7", "L4", "K3", "D1"}


@pytest.mark.hostile
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_thousand_damaged_and_forged_files(seed, tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.helpers.hostile", str(seed), CASES,
         str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    print(found)
    assert found["grown_mb"] < 64
    assert found["worst_s"] < 10  # a guard against hangs; milliseconds are usual
    outcomes = dict(found["outcomes"])
    assert outcomes["loaded"] > int(CASES) // 20
    assert outcomes.keys() >= RULES


#: Opens a file in a fresh process and says which rule refused it and what memory it took.
OPEN = """if True:
    import sys
    import vkv, vkv.format.info
    from tests.helpers.memory import peak
    from vkv.errors import VkvError

    start = peak()
    try:
        info = vkv.inspect(sys.argv[1])
        assert info.accounting.adds_up and info.to_dict()
        rule = None
    except VkvError as exc:
        rule = exc.rule
    print(rule, (peak() - start) / 2**20)
"""


def opened(path: Path) -> tuple[str, float]:
    """Rule that refuses the file (``None`` if none does) and megabytes used."""
    run = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True,
                         timeout=120, check=True)  # fmt: skip
    rule, grown = run.stdout.split()
    return rule, float(grown)


def blank() -> Draft:
    return Draft({"version": "1.0", "producer": "", "layers": [], "tensors": {}})


def with_header(raw: bytes) -> bytes:
    return blank().build(header=lambda _: raw)


def with_json(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def unknown_field(value: bytes) -> bytes:
    """A header of the largest size with many small things in a field that nobody knows."""
    head = {"layers": [], "producer": "", "tensors": {}, "version": "1.0", "zz": None}
    start = msgpack.packb(head)[:-1]
    count = (limits.MAX_HEADER - len(start) - 5) // len(value)
    return with_header(start + b"\xdd" + count.to_bytes(4, "big") + value * count)


def many_tensors() -> bytes:
    """As many names of tensors as fit: an account that compares all with all would not end."""
    draft = blank()
    draft.store("t", "table", "U8", [1], b"x")
    run = {"codec": "x", "version": 1, "parts": {"a": "t"}, "tokens": 1}
    tensors = {f"{i:x}": {"dtype": "U8", "shape": [1, 1], "segments": [run]} for i in range(4_000)}
    draft.header["layers"] = [{"kind": "kv", "tensors": tensors}]
    return draft.build()


def many_stored() -> bytes:
    draft = blank()
    tensors = {}
    for i in range(4_000):
        draft.store(f"{i:x}", "payload", "U8", [1, 1], b"x")
        run = {"codec": "x", "version": 1, "parts": {"a": f"{i:x}"}}
        tensors[f"{i:x}"] = {"dtype": "U8", "shape": [1, 1], "segments": [run]}
    draft.header["layers"] = [{"kind": "kv", "tensors": tensors}]
    return draft.build()


def colliding() -> bytes:
    """Keys that are lists of whole numbers of one hash: a table of them would not end."""
    numbers = [msgpack.packb(k * ((1 << 61) - 1)) for k in range(9)]
    keys = [
        b"\x95" + b"".join(k)
        for k in itertools.islice(itertools.product(numbers, repeat=5), 18_000)
    ]
    head = {"layers": [], "producer": "", "tensors": {}, "version": "1.0", "zz": None}
    table = b"\xdf" + len(keys).to_bytes(4, "big") + b"".join(key + b"\xc0" for key in keys)
    return with_header(msgpack.packb(head)[:-1] + table)


def many_of(field: str, item: bytes) -> bytes:
    """As many items of a list field as fit."""
    head = {"layers": [], "producer": "", "ropes": [], "tensors": {}, "version": "1.0"}
    head = dict(sorted({**head, field: []}.items()))
    count = (limits.MAX_HEADER - 100) // len(item)
    mark = msgpack.packb(field) + b"\x90"
    items = msgpack.Packer().pack_array_header(count) + item * count
    return with_header(msgpack.packb(head).replace(mark, mark[:-1] + items))


def json_of(item: str) -> str:
    count = (limits.MAX_JSON - 40) // (len(item) + 1)
    return '{"__metadata__":{"format":"vkv"},"x":[' + ",".join([item] * count) + "]}"


def twins() -> str:
    """Many keys, the last two alike: a search that compares all with all would not end."""
    keys = [f'"{i:x}":0' for i in range(130_000)]
    return "{" + ",".join([*keys, keys[-1]]) + "}"


#: A layer with children.
LIST = b"\x82\xa8children\xdc\x03\xe8" + b"\x81\xa4kind\xa1x" * 1000 + b"\xa4kind\xa1x"

ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty maps": (lambda: unknown_field(b"\x80"), "None"),
    "empty lists": (lambda: unknown_field(b"\x90"), "None"),
    "small maps": (lambda: unknown_field(b"\x81\xa0\xc0"), "None"),
    "colliding keys": (colliding, "H1"),
    "layers": (lambda: many_of("layers", b"\x81\xa4kind\xa1x"), "H2"),
    "children": (lambda: many_of("layers", LIST), "H8"),
    "ropes": (lambda: many_of("ropes", b"\x81\xa4dims\x02"), "H2"),
    "needs": (lambda: many_of("needs", b"\xa2ab"), "H2"),
    "deep lists": (lambda: with_header(b"\x91" * limits.MAX_HEADER), "H1"),
    "array of 2^32": (lambda: with_header(b"\xdd\xff\xff\xff\xff"), "H1"),
    "map of 2^32": (lambda: with_header(b"\xdf\xff\xff\xff\xff"), "H1"),
    "names of tensors": (many_tensors, "None"),
    "stored tensors": (many_stored, "None"),
    "JSON lists": (lambda: with_json(json_of("[]")), "C2"),
    "JSON maps": (lambda: with_json(json_of('{"":{"":0}}')), "C2"),
    "JSON digits": (lambda: with_json('{"x":' + "9" * 2_000_000 + "}"), "C3"),
    "JSON depth": (lambda: with_json("{" + '"a":{' * 300_000), "C2"),
    "JSON twins": (lambda: with_json(twins()), "C3"),
    "JSON escapes": (lambda: with_json('{"' + "\\ud800" * 300_000 + '":0}'), "C3"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_bombs(name, tmp_path):
    """Time ends the process; memory stays under what a few large files would take."""
    make, rule = ATTACKS[name]
    (tmp_path / "a.vkv").write_bytes(make())
    found, grown = opened(tmp_path / "a.vkv")
    print(name, found, grown)
    assert found == rule
    assert grown < 64


@pytest.mark.parametrize("at", ["x" * 1_000_000, "l0.keys"])
def test_messages_are_short_whatever_a_file_is_named(at, tmp_path):
    draft = blank()
    (tmp_path / "a.vkv").write_bytes(draft.build(table=lambda t: t | {at: {"y" * 500_000: 0}}))
    for text in (
        str(outcome(tmp_path / "a.vkv")),
        *map(str, vkv.validate(tmp_path / "a.vkv").findings),
    ):
        assert "expected exactly dtype" in text
        assert len(text) < 1000


def expanding(size: int, count: int, shape: list[int], role: str = "payload") -> bytes:
    """``count`` segments that all decode the same stored bytes."""
    draft = blank()
    draft.store("data", role, "U8", [1, size], bytes(size))
    runs = [{"codec": "raw", "version": 1, "params": {"dtype": "U8"}, "tokens": 1,
             "parts": {"data": "data"}}] * count  # fmt: skip
    tensor = {"dtype": "U8", "shape": shape, "segments": runs}
    draft.header["layers"] = [{"kind": "arrays", "scalars": {"size": 1}, "tensors": {"0": tensor}}]
    return draft.build()


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (expanding(4096, 1000, [1000, 4096]), "H6"),
        (expanding(4096, 1000, [1000, 4096], "table"), "H10"),
        (expanding(1, 1, [1, (1 << 31) - 1]), "H10"),
        (expanding(1, 1, [(1 << 31) - 1] * 6 + [1, (1 << 31) - 1]), "H10"),
        (expanding(1, 1, [1, 1 << 31]), "H2"),
    ],
)
def test_memory_that_the_file_cannot_fill_is_never_asked_for(data, rule, tmp_path):
    (tmp_path / "a.vkv").write_bytes(data)
    for use in (vkv.inspect, vkv.load):
        with pytest.raises(HeaderError) as caught:
            use(tmp_path / "a.vkv")
        assert caught.value.rule == rule


def test_shapes_without_elements(tmp_path):
    """MLX counts sizes in 32 bits, and some of its kernels take no empty arrays."""
    for shape in ([1 << 30, 0], [0, (1 << 31) - 64], [0, 1, 0, 64]):
        for codec, params in (
            ("raw", {"dtype": "F16"}),
            ("affine", {"bits": 4, "group": 64, "scale": "F16"}),
        ):
            draft = blank()
            known = registry.resolve(codec, 1, params)
            forms = known.layout(tuple(shape))
            for part, (dtype, dims) in forms.items():
                draft.store(part, known.roles[part], dtype, list(dims), b"")
            run = {"codec": codec, "version": 1, "params": params, "parts": {p: p for p in forms}}
            tensor = {"dtype": "F16", "shape": shape, "segments": [run]}
            layer = {"kind": "arrays", "scalars": {"size": 1}, "tensors": {"0": tensor}}
            draft.header["layers"] = [layer]
            (tmp_path / "a.vkv").write_bytes(draft.build())
            error = outcome(tmp_path / "a.vkv")
            assert error is None or error.rule in ("A2", "H2"), error


def outcome(path: Path) -> VkvError | None:
    try:
        vkv.load(path)
    except VkvError as exc:
        return exc
    return None


NAN, INF = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"


@pytest.mark.parametrize(
    ("kind", "scalars", "names", "bits", "reported"),
    [
        ("kv", {"offset": 1}, ("keys", "values"), NAN, ["layers[0].keys"]),
        ("kv", {"offset": 1}, ("keys", "values"), INF, ["layers[0].keys"]),
        ("arrays", {"size": 2}, ("0", "1"), NAN, ["layers[0].0"]),
        ("arrays", {"size": 2}, ("0", "1"), INF, []),  # some models keep minus infinity in a slot
    ],
)
def test_values_that_no_model_makes_are_reported_and_load(
    kind, scalars, names, bits, reported, tmp_path
):
    draft, tensors = blank(), {}
    for name, stored in zip(names, (bits + bytes(4), bytes(8)), strict=True):
        draft.store(name, "payload", "F32", [1, 1, 1, 2], stored)
        run = {"codec": "raw", "version": 1, "params": {"dtype": "F32"}, "parts": {"data": name}}
        run |= {"tokens": 1} if kind == "kv" else {}
        tensors[name] = {"dtype": "F32", "shape": [1, 1, 1, 2], "segments": [run]}
    draft.header["layers"] = [{"kind": kind, "scalars": scalars, "tensors": tensors}]
    (tmp_path / "a.vkv").write_bytes(draft.build())
    report = vkv.validate(tmp_path / "a.vkv", deep=True)
    assert [(f.rule, f.at) for f in report.findings if f.rule] == [("D2", at) for at in reported]
    assert vkv.validate(tmp_path / "a.vkv").ok
    cache = vkv.load(tmp_path / "a.vkv").cache[0]
    first = cache.keys if kind == "kv" else cache[0]
    assert mx.isfinite(first[..., :1, :]).flatten().tolist() == [False, True]


class Careless(Raw):
    """A codec that decodes to another shape than it was asked for."""

    def decode(self, parts: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return parts["data"][..., :1]


def test_codec_that_decodes_to_another_shape_is_caught(monkeypatch):
    monkeypatch.setitem(registry.CODECS, ("raw", 1), Careless)
    with pytest.raises(CodecError) as caught:
        vkv.load(GOOD / "raw-kv-f16.vkv")
    assert caught.value.rule == "K4"
    assert "expected (1, 2, 3, 8)" in str(caught.value)


def test_one_damaged_layer_fails_the_load_and_touches_nothing_else(tmp_path):
    data = bytearray((GOOD / "raw-kv-f16.vkv").read_bytes())
    before = vkv.load(GOOD / "raw-kv-f16.vkv")
    kept = [mx.array(c.keys) for c in before.cache]
    data[-1] ^= 1
    (tmp_path / "a.vkv").write_bytes(data)
    with pytest.raises(VkvError) as caught:
        vkv.load(tmp_path / "a.vkv")
    assert caught.value.rule == "D1"
    assert str(caught.value.at).startswith("layers.1.values")
    for cache, keys in zip(before.cache, kept, strict=True):
        assert mx.array_equal(cache.keys, keys)


def test_digests_are_skipped_only_when_asked(tmp_path):
    data = bytearray((GOOD / "raw-kv-f16.vkv").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.vkv").write_bytes(data)
    assert len(vkv.load(tmp_path / "a.vkv", verify=False).cache) == 2
    with open_file(tmp_path / "a.vkv") as file, pytest.raises(VkvError):
        file.array("layers.1.values.0.data")


def test_every_byte_counts():
    """Any flipped bit is refused: by a rule, or by the digest of what it is in."""
    path = GOOD / "rope-chunked.vkv"
    data = path.read_bytes()
    with open_document(data) as document:
        known = document.id
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            with open_document(changed) as document:
                for name in document.header.tensors:
                    document.read(name)
                found = document.id
        except VkvError:
            continue
        # What is left: the header itself, whose id tells, and the version in the JSON.
        assert found != known or b'"vkv":"1.0"' not in changed


def ring_of_many_segments(rows: int, count: int) -> bytes:
    """One long wrapped ring; each of its segments asks for the positions of its rows."""
    draft = blank()
    shape = [1, 1, rows + count, 2]

    def run(name: str, tokens: int) -> dict[str, Any]:
        draft.store(name, "payload", "F16", [1, 1, tokens, 2], bytes(4 * tokens))
        return {"codec": "raw", "version": 1, "params": {"dtype": "F16"}, "tokens": tokens,
                "parts": {"data": name}}  # fmt: skip

    keys = [run(f"{i:x}", 1) | {"rope": 0} for i in range(count)] + [run("rest", rows)]
    tensors = {
        "keys": {"dtype": "F16", "shape": shape, "segments": keys},
        "values": {"dtype": "F16", "shape": shape, "segments": [run("values", rows + count)]},
    }
    scalars = {"offset": rows + count + 5, "keep": 2, "max_size": rows + count, "idx": 100}
    layer = {"kind": "rotating", "scalars": scalars, "tensors": tensors}
    draft.header |= {"layers": [layer], "needs": ["rope"], "ropes": [{"dims": 2, "base": 1e4}]}
    return draft.build()


@pytest.mark.slow
def test_positions_of_a_ring_take_no_memory_for_each_row(tmp_path):
    (tmp_path / "a.vkv").write_bytes(ring_of_many_segments(400_000, 2000))
    tracemalloc.start()
    assert vkv.load(tmp_path / "a.vkv").cache[0].offset == 402_005
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20  # of Python alone: 4 MB, and 19 with a list of positions


def test_file_cut_short_after_it_was_opened(tmp_path):
    """Its tensors are refused by rule, and no later load hears of it."""
    path = tmp_path / "a.vkv"
    path.write_bytes((GOOD / "raw-kv-f32.vkv").read_bytes())
    with open_file(path) as file:
        names = [e.name for e in file.document.entries.values() if e.name.startswith("layers")]
        assert file.array(names[0]).shape == (1, 2, 3, 8)
        os.truncate(path, file.document.entries[names[1]].start + 4)
        for name in names[1:3]:
            with pytest.raises(ContainerError) as caught:
                file.array(name)
            assert caught.value.rule == "C1"
        with contextlib.suppress(ContainerError):
            file.prefetch(names[3:])  # ... and never asked for
    for _ in range(3):
        assert len(vkv.load(GOOD / "raw-kv-f32.vkv").cache) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"layers.1.keys", b"layers.1.keyz"), (b'"F32"', b'"I32"'), (b"[1,2,3,8]", b"[1,2,8,3]"),
     (b"data_offsets", b"data_offsetz"), (b'{"', b"{{")],
)  # fmt: skip
def test_table_rewritten_after_the_file_was_opened(old, new, tmp_path):
    path = tmp_path / "a.vkv"
    path.write_bytes((GOOD / "raw-kv-f32.vkv").read_bytes())
    with open_file(path) as file:
        size = file.document.entries[framing.HEADER].start
        raw = path.read_bytes()
        with path.open("r+b") as out:  # in place: the descriptor sees it
            out.write(raw[:size].replace(old, new))
        with pytest.raises(ContainerError) as caught:
            file.array("layers.1.keys.0.data")
        assert caught.value.rule == "C1"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_loads_leave_neither_threads_nor_descriptors():
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    vkv.load(GOOD / "affine-4bit-group64-f16.vkv")
    before = held()
    for _ in range(20):
        vkv.load(GOOD / "affine-4bit-group64-f16.vkv")
    # What an earlier test left may go meanwhile.
    assert all(now <= then for now, then in zip(held(), before, strict=True))
