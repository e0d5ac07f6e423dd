"""What every cache kind must do. A new kind joins by a line in ``tests.helpers.kinds``."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

import vkv
from tests.helpers.kinds import CASES, EMPTY, check_same, content, fill, leaves, rows
from vkv.caches.kinds.live import (
    ADAPTERS,
    cache_class,
    cut,
    kind_of,
    make,
    shortest,
    snapshot,
    visible,
)
from vkv.caches.loading.compatibility import differences
from vkv.errors import CacheError
from vkv.format.kinds import KINDS, leading_rows
from vkv.format.schema import Layer

every = pytest.mark.parametrize("name", CASES)
every_kind = pytest.mark.parametrize("kind", EMPTY)
WIDE = {"dims": (64, 64)}


def fed(kind, *steps):
    """A cache of the kind after calls of so many tokens; children alike."""
    cache = EMPTY[kind]()
    for leaf in leaves(cache):
        if isinstance(leaf, ArraysCache):
            for i in range(len(leaf.cache)):
                leaf[i] = mx.random.normal((1, 3, 64), key=mx.random.key(sum(steps) + i))
        else:
            fill(leaf, *steps, **WIDE)
    return cache


def remade(taken):
    """A cache made of a snapshot."""
    loaded = {
        name: (v.encoded[0].codec, v.encoded[0].parts) if v.encoded else v.x
        for name, v in taken.values.items()
    }
    if taken.children:
        loaded["children"] = [remade(child) for child in taken.children]
    return make(taken.kind, taken.scalars, loaded)


def through_file(path, cache, **options):
    vkv.save(path, [cache], **options)
    return vkv.load(path).cache[0]


def test_every_kind_is_here():
    made = {kind_of(leaf).name for case in CASES.values() for leaf in leaves(case()[0])}
    assert made | {"list"} == set(KINDS) == set(ADAPTERS) == set(EMPTY)
    assert {name: cache_class(kind).__name__ for name, kind in KINDS.items()} == {
        name: kind.class_names[0] for name, kind in KINDS.items()
    }
    assert {name: kind_of(make()).name for name, make in EMPTY.items()} == {n: n for n in EMPTY}


@every
def test_made_of_its_snapshot_it_is_the_same(name):
    cache, _ = CASES[name]()
    check_same(content(remade(snapshot(cache))), content(cache))


@every
def test_a_file_gives_it_back_bit_for_bit(name, tmp_path):
    cache, _ = CASES[name]()
    before = content(cache)
    loaded = through_file(tmp_path / "a.vkv", cache)
    assert type(loaded) is type(cache)
    check_same(content(loaded), before)
    check_same(content(cache), before)  # saving changed nothing
    assert vkv.validate(tmp_path / "a.vkv", deep=True).ok


@every
def test_it_goes_on_as_if_never_saved(name, tmp_path):
    cache, form = CASES[name]()
    loaded = through_file(tmp_path / "a.vkv", cache)
    for a, b in zip(leaves(cache), leaves(loaded), strict=True):
        if isinstance(a, ArraysCache):
            check_same(a.make_mask(6), b.make_mask(6))
            continue
        for i, count in enumerate((1, 1, 3, 1)):
            more = rows(count, seed=100 + i, **form)
            check_same(a.update_and_fetch(*more), b.update_and_fetch(*more))
            assert (a.offset, a.is_trimmable()) == (b.offset, b.is_trimmable())


@every
def test_a_copy_is_the_same_and_every_call_is_answered(name, tmp_path):
    loaded = through_file(tmp_path / "a.vkv", CASES[name]()[0])
    check_same(content(copy.deepcopy(loaded)), content(loaded))
    for cache in leaves(loaded):
        assert hasattr(cache, "bits") == isinstance(cache, QuantizedKVCache)
        if not cache.empty():
            assert cache.nbytes > 0
            assert cache.state


@every
def test_the_same_cache_is_the_same_bytes(name, tmp_path):
    cache, _ = CASES[name]()
    first = vkv.save(tmp_path / "a.vkv", [cache])
    again = vkv.save(tmp_path / "b.vkv", vkv.load(tmp_path / "a.vkv").cache)
    assert first.id == again.id
    assert (tmp_path / "a.vkv").read_bytes() == (tmp_path / "b.vkv").read_bytes()


@every_kind
@pytest.mark.parametrize("steps", [(70,), (130,), (90, *[1] * 20)], ids=str)
@pytest.mark.parametrize("codec", ["affine:bits=8", "nsnquant:bits=2", "tc:step=0.3"])
def test_a_lossy_codec_keeps_the_form_and_its_own_codes(kind, steps, codec, tmp_path):
    cache = fed(kind, *steps)
    loaded = through_file(tmp_path / "a.vkv", cache, codec=codec)
    before, after = visible(snapshot(cache)).walk(), snapshot(loaded).walk()
    assert [s.scalars for s in after] == [s.scalars for s in before]
    for a, b in zip(before, after, strict=True):
        for name, value in a.values.items():
            assert b.values[name].shape == value.shape
            if value.x is not None and value.tokens:
                error = mx.linalg.norm(b.values[name].x - value.x) / mx.linalg.norm(value.x)
                assert error < 0.5
    vkv.save(tmp_path / "b.vkv", [loaded], codec=codec)
    assert (tmp_path / "a.vkv").read_bytes() == (tmp_path / "b.vkv").read_bytes()


@every_kind
def test_it_grows_as_a_delta_where_leading_rows_are_the_same(kind, tmp_path):
    parent, child = fed(kind, 40), fed(kind, 40, 20)
    vkv.save(tmp_path / "a.vkv", [parent], tokens=range(40))
    info = vkv.save(tmp_path / "b.vkv", [child], tokens=range(60), parent=tmp_path / "a.vkv")
    check_same(content(vkv.load(tmp_path / "b.vkv").cache[0]), content(child))
    grows = any(
        leading_rows(Layer(kind=s.kind, scalars=s.scalars), v.shape[-2]) >= 40 and not v.encoded
        for s in snapshot(parent).walk()
        for v in s.values.values()
        if v.tokens
    )
    assert bool(info.dependencies) == grows


@every
def test_it_is_cut_where_it_can_be_and_refused_elsewhere(name):
    cache, form = CASES[name]()
    offset = max((getattr(leaf, "offset", 0) for leaf in leaves(cache)), default=0)
    least = shortest(cache)
    for tokens in range(offset):
        one, before = copy.deepcopy(cache), content(cache)
        if least is None or tokens < least:
            with pytest.raises(CacheError, match="cannot drop the last") as caught:
                cut([one], tokens, offset)
            assert caught.value.rule == "L8"
            check_same(content(one), before)
            continue
        cut([one], tokens, offset)
        for leaf, whole in zip(leaves(one), leaves(cache), strict=True):
            assert leaf.offset == tokens
            check_same(first_rows(leaf, tokens), first_rows(whole, tokens))
            new = rows(1, seed=9, **form)
            leaf.update_and_fetch(*new)
            assert leaf.offset == tokens + 1


def first_rows(cache, tokens):
    """Stored rows of a cache whose tokens are before ``tokens``."""
    taken = snapshot(cache)
    start = taken.scalars.get("start", 0)
    arrays = []
    for _, value in sorted(taken.values.items()):
        held = [value.x] if value.x is not None else list(value.encoded[0].parts.values())
        arrays += [x[..., : tokens - start, :] for x in held]
    return arrays if tokens > start else []


class Maker:
    """A model as far as ``make_prompt_cache`` asks: it makes the caches it is given."""

    def __init__(self, make_one):
        self.make_cache = lambda: [make_one()]


@every_kind
def test_numbers_that_a_model_fixes_are_compared(kind, tmp_path):
    head = vkv.save(tmp_path / "a.vkv", [fed(kind, 40)]).header
    assert differences(head, Maker(EMPTY[kind])) == []
    layer = head.layers[0]
    for constant in KINDS[kind].constants:
        scalars = layer.scalars | {constant: layer.scalars[constant] + 1}
        other = type(layer)(kind=kind, scalars=scalars, tensors=layer.tensors)
        changed = type(head)(version="1.0", producer="", layers=(other,), tensors=head.tensors)
        (text,) = differences(changed, Maker(EMPTY[kind]))
        assert f"{constant} {scalars[constant]} in the file" in text
