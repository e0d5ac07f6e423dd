"""Bases: trained on texts, in a file of their own, used by the files of caches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import vkv
from fixtures.models import tiny
from tests.helpers.basis import MODEL, OTHER, caches, text, train
from vkv.caches.basis.training import _between, _pulled
from vkv.caches.kinds.adapter import Value
from vkv.caches.rope import rotate
from vkv.caches.saving.request import codec_pair
from vkv.caches.saving.tensor_plan import TensorPlan
from vkv.errors import CacheError, MismatchError, MissingFileError, VkvError
from vkv.format.schema import Layer, Rope

NAMES = [f"layers.{i}.{name}.basis" for i in (0, 1) for name in ("keys", "values")]


@pytest.fixture(scope="module")
def basis(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("basis") / "tiny.basis.vkv"
    train(path)
    return path


@pytest.fixture
def folder(tmp_path, basis) -> Path:
    shutil.copy(basis, tmp_path / "any.vkv")
    return tmp_path


def save(path: Path, cache: list[Any], basis: Path | None, **options: Any) -> vkv.Info:
    options = {"model": MODEL, "codec": "tc:bits=3"} | options
    return vkv.save(path, cache, basis=basis, durable=False, **options)


def arrays(path: Path, **options: Any) -> list[mx.array]:
    return [x for c in vkv.load(path, **options).cache for x in (c.keys, c.values)]


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True))


# --- the file ---


def test_a_basis_is_a_sound_file_that_says_what_it_is(basis):
    assert vkv.validate(basis, deep=True, model=MODEL).findings == []
    info = vkv.inspect(basis)
    assert list(info.header.tables) == NAMES
    assert {t.role for t in info.header.tensors.values()} == {"table"}
    assert info.metadata == {
        "basis.tokens": "2 x 300",
        "basis.weights": "gradients of 2 x 80 tokens",
    }
    assert (info.tokens, info.header.layers, info.accounting.adds_up) == (None, (), True)


def test_the_same_texts_give_the_same_bytes(basis, tmp_path):
    train(tmp_path / "again.vkv")
    assert (tmp_path / "again.vkv").read_bytes() == basis.read_bytes()


def test_two_are_told_apart(basis, tmp_path):
    train(tmp_path / "other.vkv", OTHER)
    found = [d.at for d in vkv.diff(basis, tmp_path / "other.vkv").differences]
    assert [at for at in found if at.startswith("tables")] == [f"tables.{name}" for name in NAMES]
    assert vkv.diff(basis, basis).same


def test_progress_counts_tokens(tmp_path):
    seen: list[tuple[int, int]] = []
    train(tmp_path / "a.vkv", progress=lambda *at: seen.append(at))
    assert seen[-1] == (760, 760)
    assert seen == sorted(seen)


def test_it_is_no_cache(basis, tmp_path):
    for use in (vkv.load, lambda path: vkv.convert(path, tmp_path / "a.vkv")):
        with pytest.raises(CacheError, match="holds tables for other files") as exc:
            use(basis)
        assert exc.value.rule == "L9"


def test_without_gradients_a_rule_weighs(tmp_path):
    class Closed(type(MODEL)):  # type: ignore[misc]
        """A model with an operation that MLX cannot differentiate."""

        def __call__(self, *args: Any, **options: Any) -> mx.array:
            logits = super().__call__(*args, **options)
            some = mx.linalg.qr(logits[0, :2, :2].astype(mx.float32), stream=mx.cpu)[1]
            return logits + 0 * some.sum()

    closed = Closed(MODEL.args)
    closed.update(MODEL.parameters())
    found = train(tmp_path / "a.vkv", closed)
    assert found.metadata["basis.weights"].startswith("caches alone: [Primitive::vjp]")
    rule = train(tmp_path / "b.vkv", probe=0)
    assert rule.metadata["basis.weights"] == "caches alone: no probe"
    assert found.header.tensors == rule.header.tensors


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "no text"),
        ([range(379)], {}, "a text of 379 tokens, expected 300 of context"),
        ([range(400)], {"context": 67}, "at least 68"),
        ([range(400)], {"probe": -1}, "-1 of probe"),
    ],
)
def test_texts_that_are_refused(tmp_path, texts, options, message):
    with pytest.raises(VkvError, match=message):
        vkv.train_basis(tmp_path / "a.vkv", MODEL, texts, **{"context": 300, "probe": 80} | options)
    assert not (tmp_path / "a.vkv").exists()


def test_a_model_without_keys_that_can_have_one(tmp_path):
    with pytest.raises(VkvError, match="no keys or values"):
        train(tmp_path / "a.vkv", tiny.deepseek_v3())


def test_layers_of_every_kind_have_tables(tmp_path):
    info = train(tmp_path / "a.vkv", tiny.gemma3_text(), probe=16)
    assert len(info.header.tables) == 6  # rotating caches too


def tensor_plan(keys: mx.array, layer: Layer, rope: Rope | None) -> TensorPlan:
    value, asked = Value(keys.shape, keys.dtype, keys), codec_pair("tc").keys
    codec = asked.configure("keys", "F32")
    return TensorPlan(
        path="layers.0.keys", name="keys", layer=layer, value=value, asked=asked, codec=codec,
        rope=rope,
    )  # fmt: skip


def test_gradients_by_keys_before_their_rope():
    """As MLX itself differentiates the rotation, YaRN's factor included."""
    rope = Rope(dims=16, base=100.0, mscale=0.7)
    keys = mx.random.normal((1, 2, 20, 32), key=mx.random.key(0))
    after = mx.random.normal(keys.shape, key=mx.random.key(1))
    plan = tensor_plan(keys, Layer(kind="kv", scalars={"offset": 20}), rope)
    want = mx.grad(lambda k: (after * rotate(k, rope, range(20))).sum())(keys)
    assert mx.allclose(_pulled(plan, after), want, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("kind", "scalars", "rows", "want"),
    [
        ("kv", {"offset": 20}, 20, list(range(4, 15))),
        # a ring of 8 that holds the sinks 0, 1 and the positions 18, 19, 14 to 17
        ("rotating", {"offset": 20, "keep": 2, "max_size": 8, "idx": 4}, 8, [4]),
        ("chunked", {"offset": 20, "chunk_size": 16, "start": 12}, 8, [0, 1, 2]),
    ],
)
def test_what_follows_the_context_is_left_out(kind, scalars, rows, want):
    keys = mx.zeros((1, 1, rows, 4))
    plan = tensor_plan(keys, Layer(kind=kind, scalars=scalars), None)
    assert _between(plan, 4, 15) == want


# --- files that stand on it ---


def test_a_cache_stored_in_a_basis_refers_to_it(folder):
    cache = caches()
    own = save(folder / "own.vkv", cache, None)
    info = save(folder / "a.vkv", cache, folder / "any.vkv")
    assert info.dependencies == {vkv.inspect(folder / "any.vkv").id: 4}
    assert info.header.needs == ("files", "rope")
    assert info.accounting.external > 0
    assert info.accounting.bits == pytest.approx(3, rel=0.03)  # of the file itself
    steps = {s.params["step"] for layer in info.header.layers
             for t in layer.tensors.values() for s in t.segments if s.codec == "tc"}  # fmt: skip
    assert len(steps) == 1
    assert not own.dependencies
    assert vkv.validate(folder / "a.vkv", deep=True).ok
    for got, want in zip(arrays(folder / "a.vkv"), arrays(folder / "own.vkv"), strict=True):
        assert mx.abs(got - want).max() < mx.abs(want).max()


def test_it_is_found_beside_or_where_it_is_said(folder, tmp_path_factory):
    save(folder / "a.vkv", caches(), folder / "any.vkv")
    want = arrays(folder / "a.vkv")
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(folder / "a.vkv", alone)
    with pytest.raises(MissingFileError, match=vkv.inspect(folder / "any.vkv").id):
        vkv.load(alone / "a.vkv")
    assert same(arrays(alone / "a.vkv", search_paths=[folder / "any.vkv"]), want)
    vkv.convert(alone / "a.vkv", alone / "b.vkv", inline=True, search_paths=[folder])
    assert same(arrays(alone / "b.vkv"), want)
    whole = vkv.inspect(alone / "b.vkv")
    assert (whole.dependencies, whole.header.needs) == ({}, ("rope",))
    assert whole.size > vkv.inspect(folder / "a.vkv").size


def test_a_grown_cache_goes_on_referring(folder):
    """Saved again without a basis: what came from one keeps it, what is new has axes of its own."""
    first = save(folder / "a.vkv", caches(), folder / "any.vkv")
    cache = vkv.load(folder / "a.vkv").cache
    MODEL(mx.array([text(3, 200)]), cache=cache)
    for name, basis in (("b", None), ("c", folder / "any.vkv")):
        info = save(folder / f"{name}.vkv", cache, basis)
        assert list(info.dependencies) == list(first.dependencies)
        old, new = info.header.layers[0].tensors["values"].segments[1:]
        assert (info.header.tensors[old.parts["basis"]].file is None) is False
        assert (info.header.tensors[new.parts["basis"]].file is None) is (basis is None)
        got = arrays(folder / f"{name}.vkv")
        want = [x for c in cache for x in (c.keys, c.values)]
        for x, y in zip(got, want, strict=True):
            assert mx.array_equal(x[..., :600, :], y[..., :600, :])


def test_a_packed_cache_holds_its_axes_and_refers_to_them_where_it_can(folder):
    save(folder / "a.vkv", caches(), folder / "any.vkv")
    packed = vkv.load(folder / "a.vkv", live="packed").cache
    for name, basis, files in (("b", None, 0), ("c", folder / "any.vkv", 1)):
        info = save(folder / f"{name}.vkv", packed, basis)
        assert len(info.dependencies) == files
        assert same(arrays(folder / f"{name}.vkv"), arrays(folder / "a.vkv"))


def test_beside_a_parent(folder):
    ids = text(9, 600)
    cache = caches()
    save(folder / "a.vkv", cache, folder / "any.vkv", tokens=ids)
    more = text(3, 200)
    MODEL(mx.array([more]), cache=cache)
    info = save(
        folder / "b.vkv", cache, folder / "any.vkv", tokens=ids + more, parent=folder / "a.vkv"
    )
    assert len(info.dependencies) == 2
    assert vkv.validate(folder / "b.vkv", deep=True).ok


def test_converting_into_a_basis(folder):
    cache = caches()
    vkv.save(folder / "raw.vkv", cache, model=MODEL)
    want = save(folder / "a.vkv", cache, folder / "any.vkv")
    got = vkv.convert(
        folder / "raw.vkv", folder / "b.vkv", codec="tc:bits=3", basis=folder / "any.vkv"
    )
    assert got.header.tensors == want.header.tensors


def test_one_of_keys_and_values_alone(folder):
    codec = {"keys": "tc:bits=3", "values": "raw"}
    info = save(folder / "a.vkv", caches(), folder / "any.vkv", codec=codec)
    assert list(info.dependencies.values()) == [2]


def test_what_is_no_keys_of_the_model_has_axes_of_its_own(folder):
    cache = [*caches()[:1], KVCache()]
    cache[1].update_and_fetch(*(mx.random.normal((1, 2, 600, 32)) for _ in range(2)))
    info = save(folder / "a.vkv", cache, folder / "any.vkv")
    assert vkv.validate(folder / "a.vkv", deep=True).ok
    assert list(info.dependencies.values()) == [4]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": OTHER}, MismatchError, "any.vkv: .*layer"),
        ({"model": None}, VkvError, "nothing says which one filled the cache"),
        ({"codec": "affine:bits=4,group=32"}, VkvError, "takes no basis, expected tc"),
    ],
)
def test_a_basis_that_does_not_fit(folder, options, error, message):
    with pytest.raises(error, match=message):
        save(folder / "a.vkv", caches(), folder / "any.vkv", **options)
    assert not (folder / "a.vkv").exists()


def test_a_file_that_is_no_basis(folder):
    cache = caches()
    save(folder / "a.vkv", cache, None)
    with pytest.raises(VkvError, match="holds no tables, expected a basis file"):
        save(folder / "b.vkv", cache, folder / "a.vkv")


def test_load_finds_the_basis_where_it_is_said_to_be(basis, tmp_path_factory):
    place = tmp_path_factory.mktemp("elsewhere")
    save(place / "a.vkv", caches(), basis)
    with pytest.raises(MissingFileError):
        vkv.load(place / "a.vkv")
    assert same(arrays(place / "a.vkv", basis=basis), arrays(place / "a.vkv", search_paths=[basis]))
