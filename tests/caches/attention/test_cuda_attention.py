"""Attention on codes by the CUDA kernels, against decoding them first: ``make test-gpu``."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from tests.helpers.attention import AFFINE, NSNQUANT, VARIANTS, Variant, case, error
from vkv.caches.attention import cuda
from vkv.codecs.kernels.device import on_cuda

gpu = pytest.mark.skipif(not on_cuda(), reason="needs an NVIDIA GPU")


def program(rows, variant: Variant) -> cuda.Program:
    columns = variant.shape[2] * variant.length
    length, causal = variant.length, variant.length > 1
    return cuda.Program(rows.keys, rows.values, columns, length, rows.scale, causal)


@gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_output_is_that_of_decoded_rows(variant):
    rows = case(variant)
    assert cuda.refuses(rows.keys, rows.values, variant.length) is None
    run = program(rows, variant)
    found = run(rows.queries, rows.keys, rows.values)
    assert error(found, rows) < 2e-3
    assert mx.array_equal(found, run(rows.queries, rows.keys, rows.values)), "no races"


@gpu
@pytest.mark.parametrize("variant", [AFFINE[2], NSNQUANT[3]], ids=str)
def test_a_program_serves_a_past_that_grows(variant):
    run = program(case(variant), variant)
    for tokens in ((0, 64, 64), (0, 640, 1), (0, 4096, 300)):
        rows = case(variant._replace(tokens=tokens), seed=1)
        assert error(run(rows.queries, rows.keys, rows.values), rows) < 2e-3


@gpu
@pytest.mark.parametrize("variant", NSNQUANT[3:], ids=str)
def test_a_long_past_has_other_tables(variant, monkeypatch):
    monkeypatch.setattr(cuda, "SHORT", 0)
    rows = case(variant)
    found = program(rows, variant)(rows.queries, rows.keys, rows.values)
    assert error(found, rows) < 2e-3


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (AFFINE[0]._replace(dtype=mx.float32), "keys of .*float32, expected float16 or bfloat16"),
        (AFFINE[0]._replace(dim=192), "head dims 192 and 192"),
        (NSNQUANT[0]._replace(keys="nsnquant:metadata_bits=16"), "default sizes"),
        (AFFINE[0]._replace(length=17, tokens=(0, 64, 20)), "17 new tokens, expected at most 16"),
    ],
)
def test_what_the_kernels_cannot_do_they_say(variant, reason):
    rows = case(variant)
    said = cuda.refuses(rows.keys, rows.values, variant.length)
    assert said is not None
    assert re.search(reason, said)
