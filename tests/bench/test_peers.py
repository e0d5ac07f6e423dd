"""Peers stand in the same table, judged by the context alone."""

from __future__ import annotations

from fixtures.models import tiny
from vkv.bench import Bench
from vkv.bench.peers import rows

TOKENS = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(200)]


def test_sliding_windows_stay_as_mlx_lm_has_them():
    model = tiny.gemma3_text()
    bench = Bench(model, TOKENS, context=128, test=32, repeat=1)
    measured = {row.name: row for row in rows(bench)}
    assert measured["mlx-lm raw"].quality.kl == 0.0
    full = sum(type(c).__name__ == "KVCache" for c in bench.raw)
    (note,) = measured["mlx-lm kv-bits 4"].notes
    assert note.startswith(f"{full} of {len(bench.raw)} layers quantized")


def test_mlx_lm_files_against_the_same_codes():
    bench = Bench(tiny.llama(head_dim=64), TOKENS, context=128, test=32, repeat=1)
    found = {row.name: row for row in rows(bench) if row.family == "mlx-lm"}
    assert found["mlx-lm raw"].quality.kl == 0.0
    ours = bench.row("affine:bits=4,scale=F32")
    assert abs(found["mlx-lm kv-bits 4"].quality.kl - ours.quality.kl) < 1e-4
    assert found["mlx-lm kv-bits 8"].quality.kl < found["mlx-lm kv-bits 4"].quality.kl
