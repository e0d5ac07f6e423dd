"""Caches of every kind of mlx-lm, in the states that use brings, and how to compare them."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from vkv.caches.kinds.live import snapshot, visible
from vkv.codecs.protocol import memory


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
    "list": lambda: (CacheList(fill(KVCache(), 10), fill(RotatingKVCache(4, keep=1), 9, 1)), {}),
    "list, nested": lambda: (
        CacheList(CacheList(fill(ChunkedKVCache(8), 3), slots((1, 2))), fill(KVCache(), 3)),
        {},
    ),
}

#: Kind -> an empty cache of it, for tokens of 64 channels, which codecs take. A new kind
#: joins the contract suite by a line here.
EMPTY = {
    "kv": KVCache,
    "concatenate": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(64, 8),
    "rotating": lambda: RotatingKVCache(96, keep=4),
    "chunked": lambda: ChunkedKVCache(96),
    "arrays": lambda: slots(None, None),
    "list": lambda: CacheList(KVCache(), RotatingKVCache(96, keep=4)),
}


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
    taken = visible(snapshot(cache))  # as a file has it
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


def leaves(cache):
    if isinstance(cache, CacheList):
        return [leaf for child in cache.caches for leaf in leaves(child)]
    return [cache]
