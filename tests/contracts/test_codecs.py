"""One suite for every codec of the registry: a new one joins by its line there.

Each test says one thing that callers rely on. What only one codec promises is tested in
``tests/codecs``.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import vkv
from tests.helpers.codecs import (
    BATCH,
    HEADS,
    by_reference,
    damaged,
    forms,
    same,
    sample,
    settings,
)
from vkv.codecs.options import options, summary
from vkv.codecs.protocol import ALONE, DTYPES, Codec, Parts, Piece, check_forms
from vkv.codecs.registry import CODECS, parse, resolve
from vkv.errors import CodecError, VkvError
from vkv.format.document import open_document
from vkv.format.dtypes import FLOATS
from vkv.format.layers import segments
from vkv.format.schema import ROLES

ROOT = Path(__file__).parents[2]
#: The step between 1 and the next number.
EPSILON = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 2.0**-23}

every_codec = pytest.mark.parametrize("cls", CODECS.values(), ids=lambda c: f"{c.id}-{c.version}")
every_setting = pytest.mark.parametrize("setting", settings(), ids=str)
every_dtype = pytest.mark.parametrize(
    "setting", [s for dtype in FLOATS for s in settings(dtype)], ids=str
)


def params(codec: Codec) -> dict[str, Any]:
    return asdict(codec)  # type: ignore[call-overload]


def decode(codec: Codec, parts: Parts, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(codec.decode(parts, shape, mx.float32))


def near(got: np.ndarray, want: np.ndarray, step: float = 2.0**-23) -> None:
    """Equal up to the order of sums."""
    assert got.shape == want.shape
    atol = 4 * step * float(np.abs(want).max(initial=0)) + 1e-5
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# --- registry, options, page ---


@every_codec
def test_registry_finds_it_by_id_and_version(cls):
    assert CODECS[cls.id, cls.version] is cls
    assert type(parse(cls.id).configure("keys", "F16")) is cls
    for text in cls.examples:
        assert parse(text).codec is cls


@every_setting
def test_its_params_build_it_again(setting):
    codec = setting.codec
    assert resolve(codec.id, codec.version, params(codec)) == codec
    for wrong in ({**params(codec), "no such": 1}, dict(list(params(codec).items())[1:])):
        with pytest.raises(CodecError) as caught:
            resolve(codec.id, codec.version, wrong)
        assert caught.value.rule == "K2"


@every_codec
def test_every_option_has_help_and_its_default_can_be_given(cls):
    assert summary(cls).endswith(".")
    listed = options(cls)
    assert [o.name for o in listed] == [f.name for f in fields(cls)]
    for option in listed:
        assert option.text.endswith(".")
        assert option.range
        for value in (option.keys, option.values):
            text = str(value).lower() if option.type == "bool" else str(value)
            parse(f"{cls.id}:{option.name}={text}")


@every_codec
def test_values_of_another_type_are_refused_when_it_is_built(cls):
    for field in fields(cls):
        with pytest.raises(CodecError) as caught:
            cls(**{field.name: object()})
        assert caught.value.at == f"{cls.id}.{field.name}"


@every_codec
def test_its_page_names_its_params_and_parts(cls):
    page = (ROOT / "spec" / "v1" / "codecs" / f"{cls.id}.md").read_text()
    assert f"version {cls.version}" in page
    names = {f.name for f in fields(cls)} | cls.roles.keys()
    assert {n for n in names if f"`{n}`" not in page} == set()
    assert f"(codecs/{cls.id}.md)" in (ROOT / "spec" / "v1" / "format.md").read_text()


def test_every_codec_has_a_good_fixture():
    have = set()
    for path in (ROOT / "fixtures" / "v1" / "good").iterdir():
        with open_document(path) as document:
            have |= {(s.codec, s.version) for _, _, _, s in segments(document.header)}
    assert have == CODECS.keys()


# --- what it says of itself ---


@every_codec
def test_traits_agree_with_its_parts(cls):
    traits, roles = cls.traits, cls.roles
    assert {*roles.values(), *traits.other_roles} <= set(ROLES)
    assert traits.expensive_part is None or roles[traits.expensive_part] == "table"
    assert not traits.verbatim or (traits.lossless and len(roles) == 1)
    assert not traits.takes_basis or traits.plans


@every_setting
def test_window_and_fewest_tokens_agree_with_span(setting):
    codec = setting.codec
    window, least = codec.window, codec.min_tokens
    assert window >= 1
    assert least % window == 0
    assert codec.refit_interval >= 0
    assert codec.span(least - 1, 1)[1] == 0
    assert codec.span(least, 1) == (0, least)
    for tokens in (0, 1, 63, 64, 65, 500):
        for start in (0, 1, 300):
            lead, body = codec.span(tokens, start)
            assert 0 <= lead <= lead + body <= tokens
            assert body % window == 0
            assert start == 0 or lead == 0


@every_setting
def test_for_rotated_keys_it_differs_in_that_alone(setting):
    codec = setting.codec.for_rotated_keys()
    assert not codec.pre_rope
    assert codec.for_rotated_keys() == codec
    assert {**params(codec), "pre_rope": None} == {**params(setting.codec), "pre_rope": None}
    assert setting.tensor == "keys" or not setting.codec.pre_rope


# --- there and back ---


@every_dtype
def test_round_trip(setting):
    codec, x = setting.codec, setting.values()
    assert codec.refuses(x.shape, x.dtype) is None
    parts = codec.encode(x)
    codec.validate(parts, x.shape)
    got = codec.decode(parts, x.shape, x.dtype)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    if codec.traits.lossless:
        assert same({"x": got}, {"x": x})
    error = mx.square(got.astype(mx.float32) - x.astype(mx.float32)).mean().item()
    centred = x.astype(mx.float32) - x.astype(mx.float32).mean(axis=2, keepdims=True)
    assert error < 0.5 * mx.square(centred).mean().item()  # half of what the mean alone leaves


@every_dtype
def test_parts_have_the_layout_and_the_roles_it_names(setting):
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    check_forms(codec.layout(x.shape), forms(parts))
    assert parts.keys() <= codec.roles.keys()


@every_dtype
def test_the_reference_decoder_agrees(setting):
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    step = max(EPSILON.get(dtype, 0) for dtype, _ in forms(parts).values())
    near(decode(codec, parts, x.shape), by_reference(codec, parts, x.shape), step)


@every_setting
def test_decoding_rounds_once_to_the_dtype_asked_for(setting):
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    want = decode(codec, parts, x.shape)
    for name in FLOATS:
        got = codec.decode(parts, x.shape, DTYPES[name])
        assert got.dtype == DTYPES[name]
        near(np.array(got.astype(mx.float32)), want, EPSILON[name])


@every_setting
def test_encoding_twice_gives_the_same_bytes(setting):
    codec, x = setting.codec, setting.values()
    assert same(codec.encode(x), codec.encode(x + 0))


@every_setting
def test_values_that_are_not_finite_are_refused_or_come_back(setting):
    codec, x = setting.codec, setting.values()
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = mx.where(mx.arange(x.size).reshape(x.shape) == 77, value, x).astype(x.dtype)
        if codec.traits.lossless:
            parts = codec.encode(bad)
            codec.validate(parts, bad.shape)
            assert same({"x": codec.decode(parts, bad.shape, bad.dtype)}, {"x": bad})
        else:
            with pytest.raises(CodecError) as caught:
                codec.encode(bad)
            assert caught.value.rule


@every_setting
def test_tensors_that_it_refuses(setting):
    """A reason, in words; and ``layout`` refuses the shape with a rule."""
    codec = setting.codec
    if codec.traits.verbatim:
        assert codec.refuses((3, 5), DTYPES[setting.dtype]) is None
        assert codec.refuses((3, 5), mx.int8) is not None
        return
    assert "dtype" in (codec.refuses((1, 2, 256, 64), mx.int32) or "")
    for shape in ((), (0,)):
        with pytest.raises(CodecError) as caught:
            codec.layout(shape)
        assert caught.value.rule


@every_setting
def test_a_fused_kernel_is_absent_or_agrees(setting):
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    fused = codec.decode_fused(parts, x.shape, x.dtype, ALONE)
    if fused is not None:
        assert mx.array_equal(fused, codec.decode(parts, x.shape, x.dtype))


# --- growth ---


@every_setting
def test_segments_join_to_what_they_decode_to(setting):
    codec, x = setting.codec, setting.values(512)
    cut = max(256, codec.min_tokens)
    first = codec.encode(x[:, :, :cut])
    rest = codec.encode_after(x[:, :, cut:], first)
    shapes = [x[:, :, :cut].shape, x[:, :, cut:].shape]
    codec.validate(rest, shapes[1])
    joined = codec.join([first, rest])
    if joined is None:
        assert not codec.traits.reuses_tables
        return
    codec.validate(joined, x.shape)
    pieces = [decode(codec, p, s) for p, s in zip((first, rest), shapes, strict=True)]
    np.testing.assert_array_equal(decode(codec, joined, x.shape), np.concatenate(pieces, axis=2))


@every_setting
def test_any_number_of_tokens_follow_where_tables_are_reused(setting):
    codec = setting.codec
    if not codec.traits.reuses_tables:
        pytest.skip("its tables are not reused")
    x = setting.values()
    parts = codec.encode(x)
    for tokens in (1, 3, 64):
        later = sample(tokens, seed=1).astype(x.dtype)
        codec.validate(codec.encode_after(later, parts), later.shape)


@every_setting
def test_a_prefix_decodes_to_the_first_tokens(setting):
    """At every multiple of the window there is one."""
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    whole = decode(codec, parts, x.shape)
    for tokens in (1, 64, 128, 130, x.shape[2]):
        cut = codec.prefix(parts, x.shape, tokens)
        if cut is None:
            assert tokens % codec.window
            continue
        shape = (*x.shape[:2], tokens, x.shape[3])
        codec.validate(cut, shape)
        near(decode(codec, cut, shape), whole[:, :, :tokens])


@every_setting
def test_a_plan_has_a_codec_for_each_tensor(setting):
    codec = parse(setting.text).configure("keys", setting.dtype)
    pieces = [
        Piece(layer, keys, sample(400, 2 * layer + keys).astype(mx.float16))
        for layer in range(2)
        for keys in (True, False)
    ]
    planned = codec.plan(pieces, 1000)
    assert len(planned) == len(pieces)
    for one, piece in zip(planned, pieces, strict=True):
        if not codec.traits.plans:
            assert (one.codec, one.parts, one.note) == (codec, None, None)
            continue
        assert type(one.codec) is type(codec)
        assert one.parts is not None
        assert piece.keys or not one.codec.pre_rope
        lead, body = one.codec.span(400, 0)
        one.codec.validate(one.parts, piece.x[:, :, lead : lead + body].shape)
        assert resolve(one.codec.id, one.codec.version, params(one.codec)) == one.codec


# --- parts that are not what it wrote ---


@every_setting
def test_parts_missing_added_or_of_another_form_are_refused(setting):
    codec, x = setting.codec, setting.values()
    parts = codec.encode(x)
    for name, part in parts.items():
        others = [
            {n: p for n, p in parts.items() if n != name},
            parts | {name: part[..., None]},
            parts | {name: mx.zeros(part.shape, mx.int64)},
        ]
        if None not in codec.layout(x.shape)[name][1]:
            others.append(parts | {name: part[..., :-1]})
        for wrong in others:
            with pytest.raises(CodecError) as caught:
                codec.validate(wrong, x.shape)
            assert (caught.value.rule, caught.value.at) == ("K3", name)
    with pytest.raises(CodecError) as caught:
        codec.validate(parts | {"no such": x}, x.shape)
    assert (caught.value.rule, caught.value.at) == ("K3", "no such")


@pytest.mark.hostile
@every_setting
def test_damaged_parts_are_refused_or_decode_to_the_shape(setting):
    codec, x = setting.codec, setting.values()
    parts, rng = codec.encode(x), np.random.default_rng(5)
    for name, part in parts.items():
        wrong = [damaged(part, rng, edits) for edits in (1, 1, 2, 4, 16, part.nbytes)]
        if None in codec.layout(x.shape)[name][1]:
            wrong += [part[: len(part) // 2], part[:-1], mx.concatenate([part, part])]
        for other in wrong:
            try:
                codec.validate(parts | {name: other}, x.shape)
                got = codec.decode(parts | {name: other}, x.shape, x.dtype)
            except VkvError as exc:
                assert exc.rule  # noqa: PT017  # it need not be raised
            else:
                mx.eval(got)
                assert (got.shape, got.dtype) == (x.shape, x.dtype)


# --- in a file ---


def filled(tokens: int, seed: int = 0) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*(sample(tokens, seed + i).astype(mx.float16) for i in range(2)))
    return cache


@pytest.mark.parametrize("text", sorted({s.text for s in settings()}))
def test_a_file_of_it_accounts_for_every_byte_and_loads(text, tmp_path):
    cache = [filled(300), filled(300, 7)]
    info = vkv.save(tmp_path / "a.vkv", cache, codec=text)
    assert info.accounting.adds_up
    assert not info.notes
    cls = parse(text).codec
    for _, _, _, segment in segments(info.header):
        if segment.codec == cls.id and not cls.traits.verbatim:
            stored = {p: info.header.tensors[name] for p, name in segment.parts.items()}
            assert {p: t.role for p, t in stored.items()} == {p: cls.roles[p] for p in stored}
    loaded = vkv.load(tmp_path / "a.vkv").cache
    assert [c.offset for c in loaded] == [300, 300]
    assert loaded[0].keys.shape[:2] == (BATCH, HEADS)
    report = vkv.validate(tmp_path / "a.vkv", deep=True)
    assert report.ok, report.findings


@pytest.mark.parametrize("text", sorted({s.text for s in settings()}))
def test_the_same_cache_gives_the_same_bytes(text, tmp_path):
    """Also after it went through a file."""
    vkv.save(tmp_path / "a.vkv", [filled(300)], codec=text)
    vkv.save(tmp_path / "b.vkv", [filled(300)], codec=text)
    vkv.save(tmp_path / "c.vkv", vkv.load(tmp_path / "a.vkv").cache, codec=text)
    first = (tmp_path / "a.vkv").read_bytes()
    assert (tmp_path / "b.vkv").read_bytes() == first
    assert (tmp_path / "c.vkv").read_bytes() == first
