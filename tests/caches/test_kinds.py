"""Every cache class of mlx-lm: into a file and back, and on from there."""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

import vkv
from vkv.caches.kinds.live import cache_class, snapshot
from vkv.codecs.protocol import memory
from vkv.errors import CacheError, VkvError
from vkv.format.kinds import KINDS


def rows(count, *, heads=2, dims=(4, 4), dtype=mx.float16, seed=0, batch=1):
    """Keys and values of ``count`` tokens."""
    return tuple(
        mx.random.normal((batch, heads, count, d), key=mx.random.key(7 * seed + i)).astype(dtype)
        for i, d in enumerate(dims)
    )


def fill(cache, *steps, step=None, trim=0, front=False, **form):
    """Feed ``steps`` tokens a call, then trim the end, or the front as llama4 does."""
    if step:
        cache.step = step
    for i, count in enumerate(steps):
        cache.update_and_fetch(*rows(count, seed=i, **form))
    if trim:
        cache.trim(trim)
    if front:
        cache.maybe_trim_front()
    return cache


def slots(*shapes, **named):
    cache = ArraysCache(len(shapes))
    for i, shape in enumerate(shapes):
        if shape is not None:
            cache[i] = mx.random.normal(shape, key=mx.random.key(i))
    for name, x in named.items():
        setattr(cache, name, x)
    return cache


CODES = {"dims": (64, 32)}
#: Name -> (cache, form of the tokens that go on).
CASES = {
    "kv 3 of 256": lambda: (fill(KVCache(), 3), {}),
    "kv full buffer": lambda: (fill(KVCache(), 256), {}),
    "kv many steps": lambda: (fill(KVCache(), 255, 1, 1, 5), {}),
    "kv trimmed": lambda: (fill(KVCache(), 20, trim=7), {}),
    "kv trimmed to nothing": lambda: (fill(KVCache(), 4, trim=4), {}),
    "kv before prefill": lambda: (KVCache(), {}),
    "kv float32": lambda: (fill(KVCache(), 3, dtype=mx.float32), {"dtype": mx.float32}),
    "kv bfloat16": lambda: (fill(KVCache(), 3, dtype=mx.bfloat16), {"dtype": mx.bfloat16}),
    "kv other value dim": lambda: (fill(KVCache(), 3, dims=(6, 3)), {"dims": (6, 3)}),
    "kv without values": lambda: (fill(KVCache(), 3, dims=(4, 0)), {"dims": (4, 0)}),
    "kv batch of 2": lambda: (fill(KVCache(), 3, batch=2), {"batch": 2}),
    "concatenate": lambda: (fill(ConcatenateKVCache(), 3, 2), {}),
    "concatenate empty": lambda: (ConcatenateKVCache(), {}),
    "quantized": lambda: (fill(QuantizedKVCache(32, 4), 3, 1, **CODES), CODES),
    "quantized 8 bits": lambda: (fill(QuantizedKVCache(32, 8), 257, **CODES), CODES),
    "quantized 2 bits": lambda: (fill(QuantizedKVCache(32, 2), 5, trim=2, **CODES), CODES),
    "quantized float32": lambda: (
        fill(QuantizedKVCache(32, 4), 3, dtype=mx.float32, **CODES),
        CODES | {"dtype": mx.float32},
    ),
    "quantized from dense": lambda: (
        fill(KVCache(), 5, **CODES).to_quantized(group_size=32, bits=4),
        CODES,
    ),
    "quantized empty": lambda: (QuantizedKVCache(32, 4), CODES),
    "rotating below": lambda: (fill(RotatingKVCache(8), 5), {}),
    "rotating below, padded": lambda: (fill(RotatingKVCache(300, keep=4), 5, 1), {}),
    "rotating below, trimmed": lambda: (fill(RotatingKVCache(8, keep=2), 6, trim=2), {}),
    "rotating at": lambda: (fill(RotatingKVCache(8, keep=2), 8), {}),
    "rotating at, by ones": lambda: (fill(RotatingKVCache(8, keep=2), *[1] * 8, step=3), {}),
    "rotating past": lambda: (fill(RotatingKVCache(8), *[1] * 13), {}),
    "rotating past, keep": lambda: (fill(RotatingKVCache(8, keep=3), 6, *[1] * 8), {}),
    "rotating past, wrapped twice": lambda: (fill(RotatingKVCache(6, keep=2), *[1] * 17), {}),
    "rotating past, at the end": lambda: (fill(RotatingKVCache(6, keep=2), *[1] * 10), {}),
    "rotating long prefill": lambda: (fill(RotatingKVCache(8, keep=2), 20), {}),
    "rotating prefill after": lambda: (fill(RotatingKVCache(8, keep=2), 20, 3), {}),
    "rotating empty": lambda: (RotatingKVCache(8, keep=2), {}),
    "chunked below": lambda: (fill(ChunkedKVCache(8), 5), {}),
    "chunked, front trimmed": lambda: (fill(ChunkedKVCache(8), 12, step=4, front=True), {}),
    "chunked, both ends": lambda: (fill(ChunkedKVCache(8), 12, step=4, front=True, trim=2), {}),
    "chunked empty": lambda: (ChunkedKVCache(8), {}),
    "arrays": lambda: (slots((1, 3, 4), (1, 2)), {}),
    "arrays, empty slot": lambda: (slots(None, (1, 2)), {}),
    "arrays before prefill": lambda: (slots(None, None), {}),
    "arrays, padding and lengths": lambda: (
        slots((2, 3), left_padding=mx.array([0, 2]), lengths=mx.array([5, 3])),
        {},
    ),
    "arrays, nothing in a slot": lambda: (slots((1, 0, 3), (1, 2)), {}),
    "list": lambda: (CacheList(fill(KVCache(), 9), fill(RotatingKVCache(4, keep=1), 9, 1)), {}),
    "list, nested": lambda: (
        CacheList(CacheList(fill(ChunkedKVCache(8), 3), slots((1, 2))), fill(KVCache(), 3)),
        {},
    ),
}
every = pytest.mark.parametrize("name", CASES)


def bits(x):
    return bytes(memory(mx.contiguous(x))) if x.size else b""


def check_same(a, b):
    """Two trees of arrays are equal to the bit."""
    if isinstance(a, mx.array):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bits(a) == bits(b)
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            check_same(x, y)
    else:
        assert a == b


def content(cache):
    """All that a cache consists of, children included."""
    taken = snapshot(cache)
    values = [value for _, value in sorted(taken.values.items())]
    arrays = [[v.x, [(k.codec, *k.parts.values()) for k in v.encoded]] for v in values]
    inner = [content(c) for c in getattr(cache, "caches", ())]
    return [
        type(cache).__name__,
        sorted(taken.scalars.items()),
        sorted(taken.values),
        arrays,
        inner,
    ]


def through_file(tmp_path, cache, **options):
    vkv.save(tmp_path / "a.vkv", [cache], **options)
    return vkv.load(tmp_path / "a.vkv").cache[0]


def leaves(cache):
    if isinstance(cache, CacheList):
        return [leaf for child in cache.caches for leaf in leaves(child)]
    return [cache]


@every
def test_comes_back_the_same(name, tmp_path):
    cache, _ = CASES[name]()
    before = content(cache)
    loaded = through_file(tmp_path, cache)
    assert type(loaded) is type(cache)
    check_same(content(loaded), before)
    check_same(content(cache), before)  # saving changed nothing
    assert vkv.validate(tmp_path / "a.vkv", deep=True).ok


@every
def test_goes_on_as_if_never_saved(name, tmp_path):
    cache, form = CASES[name]()
    loaded = through_file(tmp_path, cache)
    for a, b in zip(leaves(cache), leaves(loaded), strict=True):
        if isinstance(a, ArraysCache):
            check_same(a.make_mask(6), b.make_mask(6))
            continue
        for i, count in enumerate((1, 1, 3, 1)):
            fed = rows(count, seed=100 + i, **form)
            check_same(a.update_and_fetch(*fed), b.update_and_fetch(*fed))
            assert (a.offset, a.is_trimmable()) == (b.offset, b.is_trimmable())


@every
def test_loaded_caches_answer_every_call(name, tmp_path):
    loaded = through_file(tmp_path, CASES[name]()[0])
    check_same(content(copy.deepcopy(loaded)), content(loaded))
    for cache in leaves(loaded):
        assert hasattr(cache, "bits") == isinstance(cache, QuantizedKVCache)
        if not cache.empty():
            assert cache.nbytes > 0
            assert cache.state


@every
def test_the_same_bytes_again(name, tmp_path):
    cache, _ = CASES[name]()
    first = vkv.save(tmp_path / "a.vkv", [cache])
    again = vkv.save(tmp_path / "b.vkv", vkv.load(tmp_path / "a.vkv").cache)
    assert first.id == again.id
    assert (tmp_path / "a.vkv").read_bytes() == (tmp_path / "b.vkv").read_bytes()


def test_the_table_covers_every_kind():
    made = {snapshot(leaf).kind for make in CASES.values() for leaf in leaves(make()[0])}
    assert made | {"list"} == set(KINDS)
    assert all(cache_class(kind).__name__ == kind.class_names[0] for kind in KINDS.values())


def test_only_tokens_are_stored(tmp_path):
    info = vkv.save(tmp_path / "a.vkv", [fill(KVCache(), 3, heads=1)])
    assert info.accounting.roles["payload"] == 2 * 3 * 4 * 2
    assert info.header.layers[0].tensors["keys"].shape == (1, 1, 3, 4)


def test_chunked_knows_its_offset(tmp_path):
    loaded = through_file(tmp_path, fill(ChunkedKVCache(8), 12, step=4, front=True))
    assert (loaded.offset, loaded.start_position, loaded.keys.shape[2]) == (12, 4, 8)


def test_loaded_rows_are_no_more_than_stored(tmp_path):
    loaded = through_file(tmp_path, fill(KVCache(), 3))
    assert loaded.nbytes == 2 * 2 * 3 * 4 * 2


def test_mix_of_recurrent_and_attention_layers(tmp_path):
    cache = [fill(KVCache(), 7) if i % 4 == 3 else slots((1, 3, 4), (1, 2)) for i in range(64)]
    info = vkv.save(tmp_path / "a.vkv", cache, tokens=range(7), codec="affine:bits=4,group=32")
    kinds = [layer.kind for layer in info.header.layers]
    assert (kinds.count("arrays"), kinds.count("kv")) == (48, 16)
    for a, b in zip(vkv.load(tmp_path / "a.vkv").cache, cache, strict=True):
        check_same(content(a), content(b))  # head dim 4: nothing could be quantized
    assert info.notes[:2] == [
        "0-2 0: asked for affine:bits=4,group=32, stored raw: recurrent state",
        "0-2 1: asked for affine:bits=4,group=32, stored raw: recurrent state",
    ]


@pytest.mark.parametrize(
    ("heads", "dims", "codec", "reason"),
    [
        (2, (80, 80), "raw", "head dim 80 is not a multiple of group 64"),
        (2, (96, 96), "raw", "head dim 96 is not a multiple of group 64"),
        (2, (100, 100), "raw", "head dim 100 is not a multiple of group 64"),
        (1, (576, 512), "raw", "MLA latents: an error in one reaches every head"),
        (2, (576, 576), "affine", None),
        (2, (192, 128), "affine", None),
    ],
)
def test_head_dims(heads, dims, codec, reason, tmp_path):
    cache = fill(KVCache(), 5, heads=heads, dims=dims)
    info = vkv.save(tmp_path / "a.vkv", [cache], codec="affine:bits=4")
    for name, dim in zip(("keys", "values"), dims, strict=True):
        tensor = info.header.layers[0].tensors[name]
        assert tensor.shape == (1, heads, 5, dim)
        assert [s.codec for s in tensor.segments] == [codec]
        expected = reason and f"asked for affine:bits=4, stored raw: {reason}"
        assert tensor.note == expected
    loaded = vkv.load(tmp_path / "a.vkv").cache[0]
    if codec == "raw":
        check_same(content(loaded), content(cache))


def mixed():
    return [fill(KVCache(), 300), fill(RotatingKVCache(8), 20, 1), slots((1, 3))]


def in_thread(call, *args):
    """What ``call`` returns or raises in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def test_from_another_thread(tmp_path):
    def lazily():
        return vkv.save(tmp_path / "a.vkv", mixed(), codec="affine:bits=4,group=32")

    cache = mixed()
    here = vkv.save(tmp_path / "b.vkv", cache)  # computes it
    there = in_thread(vkv.save, tmp_path / "c.vkv", cache)
    assert here.id == there.id
    assert in_thread(lazily).accounting.adds_up
    for a, b in zip(in_thread(vkv.load, tmp_path / "b.vkv").cache, cache, strict=True):
        check_same(content(a), content(b))


def test_lazy_arrays_of_another_thread_are_refused(tmp_path):
    cache = mixed()  # MLX 0.32 cannot compute it in another thread
    with pytest.raises(CacheError, match=r"call mx.eval on the cache in the thread") as caught:
        in_thread(vkv.save, tmp_path / "a.vkv", cache)
    assert (caught.value.rule, caught.value.at) == ("L2", "layers[0]")
    assert os.listdir(tmp_path) == []
    assert vkv.save(tmp_path / "a.vkv", cache).size  # nothing happened to it


class Sub(KVCache):
    pass


class Stranger:
    """A cache of somebody else's, without ``state``."""

    offset, keys, values = 3, None, None


class Wrapper:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def holding(x):
    cache = ArraysCache(1)
    cache[0] = x
    return cache


def changed(cache=None, **attributes):
    """A filled cache with some attributes of other types or forms than mlx-lm gives them."""
    cache = cache or fill(KVCache(), 3)
    for name, value in attributes.items():
        setattr(cache, name, value)
    return cache


def quantized():
    return fill(QuantizedKVCache(32, 4), 3, **CODES)


def nested(depth):
    cache = KVCache()
    for _ in range(depth):
        cache = CacheList(cache)
    return cache


@pytest.mark.parametrize(
    ("make", "rule", "message"),
    [
        (lambda: fill(Sub(), 3), "L1", r"cannot store a \S*test_kinds\.Sub; known caches are"),
        (Stranger, "L1", r"cannot store a \S*test_kinds\.Stranger;"),
        (lambda: Wrapper(fill(KVCache(), 3)), "L1", r"cannot store a \S*test_kinds\.Wrapper;"),
        (lambda: BatchKVCache([0]), "L1", "BatchKVCache.*extract one sequence of the batch first"),
        (lambda: CacheList(KVCache(), Sub()), "L1", r"test_kinds\.Sub;"),
        (lambda: holding(np.ones(3)), "L2", "ndarray, expected an array"),
        (lambda: holding([1.0]), "L2", "list, expected an array"),
        (lambda: holding(mx.ones((1,) * 9)), "L2", "no file can hold mlx.core.float32"),
        (lambda: changed(keys=mx.ones((1, 1, 3, 4), mx.float64)), "L2", "mlx.core.float64"),
        (lambda: changed(keys=mx.ones((1, 3, 4))), "L2", r"expected \(B, H, T, D\)"),
        (lambda: changed(keys=mx.ones((3,))), "L2", r"expected \(B, H, T, D\)"),
        (lambda: changed(values=None), "L2", r"values: NoneType, expected an array"),
        (lambda: changed(offset=mx.array(3)), "L2", "offset is of type array"),
        (lambda: changed(offset=300), "L5", "256 rows, its scalars say 300"),
        (lambda: changed(offset=-1), "L3", "'offset' is -1, expected a whole number"),
        (lambda: changed(values=mx.ones((1, 1, 3, 4))), "L4", "alike but for D"),
        (lambda: RotatingKVCache(None), "L2", "max_size is of type NoneType"),
        (lambda: changed(quantized(), keys=mx.ones((1, 1, 3, 4))), "L2", "expected three arrays"),
        (lambda: changed(quantized(), keys=(mx.ones(3), None, None)), "L2", r"keys\.codes: \(3,\)"),
        (lambda: changed(quantized(), bits=8), "K3", "expected"),
        (lambda: changed(quantized(), bits=7), "A1", "7 is not one of"),
        (lambda: ArraysCache(65), "L3", "65 slots, the limit is 64"),
        (lambda: nested(5), "L3", "nested deeper than 4 lists"),
        (lambda: changed(ChunkedKVCache(8), start_position=248), "L5", "starts at 248, past"),
        (lambda: None, "L1", "cannot store a builtins.NoneType;"),
    ],
)
def test_one_unsavable_layer_in_eight_and_nothing_is_written(make, rule, message, tmp_path):
    cache = [fill(KVCache(), 3) for _ in range(7)] + [make()]
    with pytest.raises(VkvError, match=message) as caught:
        vkv.save(tmp_path / "a.vkv", cache)
    assert caught.value.rule == rule
    assert str(caught.value).startswith("layers[7]")
    assert os.listdir(tmp_path) == []
