"""``vkv bench`` on a tiny model: the zero is zero, runs reproduce, the files are written."""

from __future__ import annotations

import json
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest

from fixtures.models import tiny
from vkv.bench import Bench, default_codecs
from vkv.bench.plot import draw
from vkv.bench.quality import compare
from vkv.bench.report import COLUMNS, aligned
from vkv.codecs.registry import CODECS
from vkv.errors import VkvError

TOKENS = [(7 * i * i + 3 * i) % tiny.VOCAB for i in range(200)]
CODECS_RUN = ["raw", "affine:bits=2,group=32", "affine:bits=8,group=32"]


def measure() -> Bench:
    bench = Bench(tiny.llama(head_dim=64), TOKENS, context=128, test=32, repeat=1, name="tiny")
    list(bench.run(CODECS_RUN))
    return bench


@pytest.fixture(scope="module")
def bench() -> Bench:
    return measure()


def test_raw_is_exactly_zero(bench):
    raw = bench.results.rows[0]
    assert (raw.quality.kl, raw.quality.kl_p99, raw.quality.top1) == (0.0, 0.0, 1.0)
    assert (raw.error_keys, raw.error_values) == (0.0, 0.0)


def test_more_bits_are_closer(bench):
    _, two, eight = bench.results.rows
    assert two.bits < eight.bits
    assert two.quality.kl > 10 * eight.quality.kl > 0
    assert two.error_keys > 10 * eight.error_keys > 0


def test_bits_all_in_are_the_files(bench):
    for row in bench.results.rows:
        assert row.bits == 8 * row.size / bench.results.elements
        assert row.bits > max(row.bits_keys, row.bits_values)


def test_quality_reproduces(bench):
    for a, b in zip(bench.results.rows, measure().results.rows, strict=True):
        np.testing.assert_allclose(
            list(asdict(a.quality).values()), list(asdict(b.quality).values()), rtol=0, atol=1e-6
        )


def test_the_raw_cache_is_left_alone(bench):
    assert [c.offset for c in bench.raw] == [128, 128]


def test_results_json(bench, tmp_path):
    bench.results.write(tmp_path / "results.json")
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["schema_version"] == 1
    assert [row["name"] for row in data["rows"]] == CODECS_RUN
    assert {"python", "mlx", "mlx-lm"} <= data["versions"].keys()


def test_table_has_a_cell_for_each_column(bench):
    table = bench.results.table()
    assert {len(line) for line in table} == {len(COLUMNS)}
    assert len(set(map(len, aligned(table).splitlines()))) <= 2


def test_pictures(bench, tmp_path):
    for path in draw(bench.results, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_every_codec_gives_examples():
    names = {text.partition(":")[0] for text in default_codecs()}
    assert names == {name for name, _ in CODECS}
    assert default_codecs()[0] == "raw"


def test_a_short_text_is_refused():
    with pytest.raises(VkvError, match="a text of 200 tokens, expected 190 of context and 32"):
        Bench(tiny.llama(), TOKENS, context=190, test=32)


def test_kl_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 11)).astype(np.float32)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits)
    found = compare(mx.array(p), mx.array(q), [1, 2, 3, 4, 5])
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert found.kl == pytest.approx(kl.mean(), rel=1e-5)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-5)
    assert found.perplexity == pytest.approx(
        np.exp(-q[np.arange(4), [2, 3, 4, 5]].mean()), rel=1e-5
    )


def test_a_row_that_fails_costs_no_other_row():
    bench = Bench(tiny.llama(head_dim=64), TOKENS, context=64, test=8, repeat=1)
    rows = list(bench.run(["raw", "affine:bits=4,group=128,scale=F99", "affine:bits=4"]))
    assert [row.name for row in rows] == ["raw", "affine:bits=4"]
    (failure,) = bench.results.failures
    assert failure.name == "affine:bits=4,group=128,scale=F99"
    assert failure.reason.startswith("CodecError: affine.scale: ")
    assert bench.results.to_dict()["failures"][0]["name"] == failure.name
