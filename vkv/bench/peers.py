"""Other ways to keep a cache, in the same table: used only when asked for and installed.

What a peer made of the context is put into plain caches before the test tokens are
read, so that it is judged by its context alone, as the files are; live, these
caches would also quantize what comes after.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from vkv.bench.quality import compare, log_probs
from vkv.bench.report import Row
from vkv.bench.run import Bench
from vkv.bench.timing import Timing, median
from vkv.caches.kinds.live import kind_of, snapshot

#: Settings of veloxquant-mlx's caches, by the name of the row.
VELOX: dict[str, dict[str, Any]] = {
    "kvquant 3-bit": {"method": "kvquant", "kvquant_bits": 3},
    "nsnquant 2-bit": {"method": "nsnquant", "nsn_bits": 2},
    "nsnquant 1-bit": {"method": "nsnquant", "nsn_bits": 1},
    "kivi 2-bit": {"method": "kivi"},
}


def rows(bench: Bench) -> Iterator[Row]:
    """Measure mlx-lm's own files, raw and quantized, then veloxquant-mlx's caches if installed."""
    yield _mlx_lm(bench, "mlx-lm raw", bench.clone())
    for bits in (4, 8):
        cache = [_quantized(c, bits) for c in bench.clone()]
        count = sum(hasattr(c, "bits") for c in cache)
        note = f"{count} of {len(cache)} layers quantized; mlx-lm quantizes no other kind"
        notes = () if count == len(cache) else (note,)
        yield _mlx_lm(bench, f"mlx-lm kv-bits {bits}", cache, notes)
    if not all(map(_is_plain, bench.raw)):
        return  # veloxquant-mlx makes caches for full attention alone
    try:
        from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig
    except ImportError:
        return
    for name, options in VELOX.items():
        config = KVCacheConfig(head_dim=_head_dim(bench), **options)
        yield _velox(bench, f"veloxquant {name}", KVCacheBuilder, config)


def _quantized(cache: Any, bits: int) -> Any:
    """Return a cache as mlx-lm quantizes it; kinds that it cannot quantize stay as they are."""
    dims = (cache.keys.shape[-1], cache.values.shape[-1]) if _is_plain(cache) else ()
    group = next((g for g in (64, 32) if dims and not any(d % g for d in dims)), None)
    return cache if group is None else cache.to_quantized(group_size=group, bits=bits)


def _is_plain(cache: Any) -> bool:
    kind = kind_of(cache)
    return kind is not None and kind.packs and not cache.empty()


def _mlx_lm(bench: Bench, name: str, cache: list[Any], notes: tuple[str, ...] = ()) -> Row:
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    with tempfile.TemporaryDirectory(prefix="vkv-bench-") as folder:
        path = Path(folder) / "cache.safetensors"

        def load() -> list[Any]:
            loaded = load_prompt_cache(str(path))
            mx.eval([c.state for c in loaded])
            return loaded  # type: ignore[no-any-return]

        save_time = median(lambda: save_prompt_cache(str(path), cache), bench.repeat)
        load_time = median(load, bench.repeat)
        size = path.stat().st_size
        dense = [_dequantized(c) if hasattr(c, "bits") else c for c in load()]
        return _row(bench, name, "mlx-lm", dense, size, save=save_time, load=load_time, notes=notes)


def _dequantized(cache: Any) -> Any:
    form = {"group_size": cache.group_size, "bits": cache.bits}
    held = [[part[..., : cache.offset, :] for part in x] for x in (cache.keys, cache.values)]
    return _dense(*(mx.dequantize(w, s, b, **form) for w, s, b in held))


def _dense(keys: mx.array, values: mx.array) -> Any:
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    cache.update_and_fetch(keys, values)
    return cache


def _velox(bench: Bench, name: str, builder: Any, config: Any) -> Row:
    caches = builder.for_model(bench.model, config)
    contents = [snapshot(c).values for c in bench.raw]

    def encode() -> None:
        for cache, values in zip(builder.for_model(bench.model, config), contents, strict=True):
            mx.eval(cache.update_and_fetch(values["keys"].x, values["values"].x))

    time = median(encode, 1)
    dense = [
        _dense(*cache.update_and_fetch(values["keys"].x, values["values"].x))
        for cache, values in zip(caches, contents, strict=True)
    ]
    size = sum(
        c.compressed_key_bytes + c.compressed_value_bytes + getattr(c, "residual_fp16_bytes", 0)
        for c in caches
    )
    held = sum(c.nbytes for c in caches)
    note = f"bytes it reports; the live cache holds {held} and there is no file"
    return _row(bench, name, "veloxquant-mlx", dense, size, encode=time, notes=(note,))


def _row(
    bench: Bench,
    name: str,
    family: str,
    cache: list[Any],
    size: int,
    *,
    encode: Timing | None = None,
    save: Timing | None = None,
    load: Timing | None = None,
    notes: tuple[str, ...] = (),
) -> Row:
    elements = bench.results.elements
    return Row(
        name=name,
        family=family,
        bits=8 * size / elements,
        size=size,
        ratio=2 * elements / size,
        quality=compare(bench.reference, log_probs(bench.model, cache, bench.test), bench.test),
        encode=encode,
        save=save,
        load=load,
        notes=notes,
    )


def _head_dim(bench: Bench) -> int:
    x = snapshot(bench.raw[0]).values["keys"].x
    if x is None:
        raise TypeError("the first layer of the raw cache holds no array")
    return x.shape[-1]
