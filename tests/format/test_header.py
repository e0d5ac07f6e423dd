"""The msgpack header: canonical bytes, strict types, references, limits."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from vkv.errors import HeaderError, UnsupportedError, VkvError
from vkv.format import header, limits
from vkv.format.layers import segment_shape, segments, walk
from vkv.format.schema import Header, Layer, Model, Rope, Segment, Stored, Tensor, Tokens

DIGEST = bytes(range(32))


def stored(**changes: Any) -> Stored:
    fields = {"role": "payload", "dtype": "F16", "shape": (1, 1, 3, 4), "digest": DIGEST}
    return Stored(**fields | changes)


def tensor(part: str, *tokens: int | None, **changes: Any) -> Tensor:
    runs = tuple(
        Segment(codec="raw", version=1, params={"dtype": "F16"}, tokens=n, parts={"data": part})
        for n in tokens or (3,)
    )
    return Tensor(**{"dtype": "F16", "shape": (1, 1, 3, 4), "segments": runs} | changes)


def sample(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "version": "1.0",
        "producer": "test",
        "layers": (Layer(kind="kv", scalars={"offset": 3}, tensors={"keys": tensor("k")}),),
        "tensors": {"k": stored()},
    }
    return Header(**fields | changes)


def plain(head: Header) -> dict[str, Any]:
    """As maps and lists, to be changed and packed by another library."""
    return msgpack.unpackb(header.dump(head))


def pack(value: Any) -> bytes:
    return msgpack.packb(ordered(value))


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: ordered(value[k]) for k in sorted(value)}
    return [ordered(v) for v in value] if isinstance(value, list | tuple) else value


def refused(raw: bytes, rule: str, error: type[VkvError] = HeaderError) -> VkvError:
    with pytest.raises(error) as caught:
        header.load(raw)
    assert caught.value.rule == rule
    return caught.value


@pytest.mark.parametrize("length", range(130))
def test_dump_is_padded_and_load_gives_it_back(length):
    head = sample(producer="x" * length)
    raw = header.dump(head)
    assert len(raw) % limits.ALIGN == 0
    again = header.load(raw)
    assert header.replace(again, pad=b"") == head
    assert header.dump(again) == raw


def test_bytes_are_those_of_another_library():
    raw = header.dump(sample(metadata={"b": "1", "ä": "2", "a": "3"}))
    assert pack(msgpack.unpackb(raw)) == raw


def test_defaults_are_absent():
    assert plain(sample()).keys() - {"pad"} == {"version", "producer", "layers", "tensors"}


def test_unknown_fields_are_ignored_and_do_not_come_back():
    head = plain(sample())
    head["layers"][0]["tensors"]["keys"]["segments"][0]["future"] = {"a": [1, 2.5, None]}
    head["zz"] = 1
    assert header.replace(header.load(pack(head)), pad=b"") == sample()


#: Value of the field ``producer`` in msgpack; each but the first breaks H1 only.
FORMS = {
    "shortest": b"\xa1x",
    "str8": b"\xd9\x01x",
    "str16": b"\xda\x00\x01x",
    "str32": b"\xdb\x00\x00\x00\x01x",
}


@pytest.mark.parametrize("form", FORMS)
def test_strings_have_one_form(form):
    raw = pack(plain(sample(producer="x")))
    assert raw.count(b"\xa8producer\xa1x") == 1
    changed = raw.replace(b"\xa8producer\xa1x", b"\xa8producer" + FORMS[form])
    if form == "shortest":
        header.load(changed)
    else:
        refused(changed, "H1")


@pytest.mark.parametrize(
    "value",
    [
        b"\xcc\x03", b"\xcd\x00\x03", b"\xd0\x03", b"\xd1\x00\x03", b"\xd3" + bytes(7) + b"\x03",
        b"\xcf" + bytes(7) + b"\x03", b"\xca\x40\x40\x00\x00", b"\xdc\x00\x01\x01",
        b"\xc5\x00\x01a", b"\xa1\xff", b"\xde\x00\x01\xa1a\x01", b"\x82\xa1a\x01\xa1a\x01",
        b"\x82\xa1b\x01\xa1a\x01",
        b"\x81\x01\x02", b"\x81\xc0\x02", b"\x81\x91\x01\x02", b"\x81\xc4\x01a\x02", b"\xc1",
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\x91" * 5000 + b"\xc0",
    ],
    ids=lambda b: b[:12].hex(),
)  # fmt: skip
def test_what_is_not_canonical_is_refused_in_unknown_fields_too(value):
    raw = pack(plain(sample()) | {"zz": None})
    assert raw.endswith(b"\xa2zz\xc0")
    header.load(raw)
    refused(raw[:-1] + value, "H1")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1.5, -1, 2**64 - 1, b"", [], {}])
def test_any_canonical_value_may_stand_in_an_unknown_field(value):
    header.load(pack(plain(sample()) | {"zz": value}))


@pytest.mark.parametrize(
    ("path", "value", "at"),
    [
        (("layers",), {}, "layers"),
        (("producer",), None, "producer"),
        (("tensors", "k", "shape"), [1, -1], "tensors[...].shape[1]"),
        (("tensors", "k", "shape"), [1 << 31], "tensors[...].shape[0]"),
        (("tensors", "k", "digest"), b"short", "tensors[...].digest"),
        (("tensors", "k", "digest"), "x" * 32, "tensors[...].digest"),
        (("tensors", "k", "dtype"), "F8", "tensors.k"),
        (("tensors", "k", "role"), "waste", "tensors.k"),
        (("layers", 0, "kind"), "", "layers[0].kind"),
        (("layers", 0, "scalars", "offset"), True, "layers[0].scalars[...]"),
        (("layers", 0, "scalars", "offset"), 2.5, "layers[0].scalars[...]"),
        (("layers", 0, "scalars", "offset"), 2**64 - 1, None),
        (("ropes",), [{"dims": 1}], "ropes[0].dims"),
        (("tokens",), {"count": 3, "digest": DIGEST}, "tokens"),
        (("needs",), "rope", "needs"),
    ],
)
def test_types_and_ranges(path, value, at):
    head: Any = plain(sample())
    place = head
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if at is None:  # any whole number is a scalar here; the layer's kind says which
        assert header.load(pack(head)).layers[0].scalars["offset"] == value
    else:
        assert refused(pack(head), "H2").at == at


@pytest.mark.parametrize("value", [{"a": 1}, {"a": None}, {"a": b"x"}, ["a"], 3])
def test_metadata_is_text_to_text(value):
    assert str(refused(pack(plain(sample()) | {"metadata": value}), "H9").at).startswith("metadata")
    if isinstance(value, dict):
        with pytest.raises(HeaderError) as caught:
            header.metadata(value)
        assert caught.value.rule == "H9"


def test_metadata_is_copied():
    given = {"a": "b"}
    assert header.metadata(given) == given
    assert header.metadata(given) is not given
    assert header.metadata(None) == {}


@pytest.mark.parametrize("version", ["1", "1.0.0", "1.x", "one", "", "1.-1", "01.0", "1.0 ", "¹.0",
                                     "1." + "9" * 5000, 1, 1.0, None, [1, 0]])  # fmt: skip
def test_version_is_major_dot_minor(version):
    refused(pack(plain(sample()) | {"version": version}), "H2")


@pytest.mark.parametrize(("version", "ok"), [("1.0", True), ("1.99", True), ("0.9", False),
                                             ("2.0", False), ("11.0", False)])  # fmt: skip
def test_any_minor_is_read_and_no_other_major(version, ok):
    raw = pack(plain(sample()) | {"version": version})
    if ok:
        assert header.load(raw).version == version
    else:
        assert "this build reads 1.x" in str(refused(raw, "H3", UnsupportedError))


def test_another_major_is_refused_whatever_its_fields_are():
    refused(pack({"version": "2.0", "layers": 7}), "H3", UnsupportedError)


def test_unknown_needs_are_all_named():
    raw = pack(plain(sample(needs=("rope",))) | {"needs": ["rope", "b", "a"]})
    assert "the file needs 'a', 'b'; this build knows checkpoints, files, rope" in str(
        refused(raw, "H4", UnsupportedError)
    )


def test_rotated_segments_must_be_announced():
    run = msgspec.structs.replace(tensor("k").segments[0], rope=0)
    layer = Layer(kind="kv", tensors={"keys": tensor("k", segments=(run,))})
    ropes = (Rope(dims=4, base=1e4),)
    refused(header.dump(sample(layers=(layer,), ropes=ropes)), "H4")
    header.load(header.dump(sample(layers=(layer,), ropes=ropes, needs=("rope",))))
    refused(header.dump(sample(layers=(layer,), needs=("rope",))), "H6")


def test_header_of_just_more_than_the_limit():
    def head(length: int) -> Header:
        return sample(metadata={"a": "x" * length})

    length = limits.MAX_HEADER - len(header.dump(head(1 << 19))) + (1 << 19)
    raw = header.dump(head(length))
    assert len(raw) == limits.MAX_HEADER
    header.load(raw)
    with pytest.raises(HeaderError) as caught:
        header.dump(head(length + limits.ALIGN))
    assert caught.value.rule == "H5"
    assert "the limit is 1048576" in str(refused(raw + b"x", "H5"))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tensors": {}}, "H6"),
        ({"tensors": {"k": stored(), "spare": stored()}}, "H6"),
        ({"tokens": Tokens(count=3, digest=DIGEST, tensor="t")}, "H6"),
        ({"tokens": Tokens(count=3, digest=DIGEST, tensor="k")}, "H6"),
        ({"layers": (Layer(kind="kv", tensors={"a": tensor("k"), "b": tensor("k")}),)}, "H6"),
        ({"layers": (Layer(kind="kv", tensors={"a": tensor("k", 2)}),)}, "H7"),
        ({"layers": (Layer(kind="kv", tensors={"a": tensor("k", shape=(3,))}),)}, "H7"),
        ({"layers": (Layer(kind="kv", tensors={"a": tensor("k", segments=())}),), "tensors": {}},
         "H7"),
    ],
)  # fmt: skip
def test_references(changes, rule):
    refused(header.dump(sample(**changes)), rule)


def test_tables_may_be_shared():
    layers = (Layer(kind="kv", tensors={"a": tensor("k"), "b": tensor("k", 1, 2)}),)
    header.load(header.dump(sample(layers=layers, tensors={"k": stored(role="table")})))


def test_token_ids():
    ids = stored(role="tokens", dtype="U32", shape=(3,))
    tokens = Tokens(count=3, digest=DIGEST, tensor="t")
    both = {"k": stored(), "t": ids}
    assert header.load(header.dump(sample(tokens=tokens, tensors=both))).tokens == tokens
    other = Tokens(count=3, digest=bytes(32), tensor="t")
    refused(header.dump(sample(tokens=other, tensors=both)), "H6")


@pytest.mark.parametrize(("depth", "rule"), [(4, None), (5, "H8"), (50, "H8"), (250, "H8")])
def test_depth_of_lists(depth, rule):
    head = plain(sample())
    for _ in range(depth):
        head["layers"] = [{"kind": "list", "children": head["layers"]}]
    raw = msgspec.msgpack.Encoder(order="sorted").encode(head)
    if rule:
        refused(raw, rule)
    else:
        found = walk(header.load(raw).layers)
        assert [at for at, _ in found][-1] == "layers[0]" + ".children[0]" * depth


@pytest.mark.parametrize("depth", [900, 5000, 300_000])
def test_depth_beyond_the_stack(depth):
    one = b"\x82\xa8children\x91"
    raw = one * depth
    assert refused(raw[: limits.MAX_HEADER], "H1")


def test_walk_and_segments_are_in_file_order():
    inner = Layer(kind="kv", tensors={"values": tensor("v"), "keys": tensor("k", 1, 2)})
    layers = (Layer(kind="list", children=(inner, Layer(kind="kv"))), Layer(kind="kv"))
    assert [at for at, _ in walk(layers)] == [
        "layers[0]", "layers[0].children[0]", "layers[0].children[1]", "layers[1]"
    ]  # fmt: skip
    found = segments(sample(layers=layers))
    assert [(at, name, segment_shape(t, s)) for at, name, t, s in found] == [
        ("layers[0].children[0].keys.segments[0]", "keys", (1, 1, 1, 4)),
        ("layers[0].children[0].keys.segments[1]", "keys", (1, 1, 2, 4)),
        ("layers[0].children[0].values.segments[0]", "values", (1, 1, 3, 4)),
    ]


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ('{"":' * 32 + "{}" + "}" * 32, None),
        ('{"":' * 33 + "{}" + "}" * 33, "H13"),
        ('"' + "x" * (limits.MAX_CONFIG - 2) + '"', None),
        ('"' + "x" * (limits.MAX_CONFIG - 1) + '"', "H13"),
        ("[1,", "H2"),
        ('{"x":Infinity}', "H2"),
    ],
)
def test_a_configuration_is_checked_when_the_file_is_opened(config, rule):
    model = Model(id=DIGEST, type="t", config=config, parameters=0, layers=(), rest=DIGEST)
    raw = header.dump(sample(model=model))
    if rule is None:
        assert header.load(raw).model == model
    else:
        assert refused(raw, rule).at == "model.config"


def test_a_header_that_is_too_long_says_what_is():
    with pytest.raises(
        HeaderError, match=r"1048704 bytes, the limit is 1048576; 1048384 of them are metadata"
    ) as e:
        header.dump(sample(metadata={"a": "x" * (limits.MAX_HEADER - 200)}))
    assert (e.value.rule, e.value.at) == ("H5", "metadata")
    many = {f"{i:0100}": stored() for i in range(8000)}
    with pytest.raises(HeaderError, match="of them are tensors") as e:
        header.dump(sample(tensors=many))
    assert (e.value.rule, e.value.at) == ("H5", "header")
