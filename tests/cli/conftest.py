"""A tiny model on disk, a few files, and a way to run the command line in this process."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from vkv_cli.main import main

import vkv
from fixtures.models import tiny


@dataclass(frozen=True)
class Ran:
    """What one run of ``vkv`` gave."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _log_as_before():
    """Commands silence the log of their process, which here is that of all tests."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _in_a_pipe(monkeypatch):
    """Parallel test runners set a width, and what a user's shell has exported may be any."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run ``vkv`` with the given arguments; ``stdin`` is what it reads."""

    def act(*args: object, stdin: str = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return Ran(status, *capsys.readouterr())

    return act


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Directory of a tiny llama."""
    return tiny.save_dir(tiny.llama(), tiny.tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """The same with other weights."""
    return tiny.save_dir(tiny.llama(seed=1), tiny.tokenizer(), tmp_path_factory.mktemp("other"))


def filled(cache: Any, dim: int = 64, tokens: int = 96) -> Any:
    """A cache with ``tokens`` normal keys and values of 2 heads, always the same."""
    key, value = (
        mx.random.normal((1, 2, tokens, dim), mx.bfloat16, key=mx.random.key(i)) for i in (0, 1)
    )
    cache.update_and_fetch(key, value)
    return cache


def caches() -> list[Any]:
    """Two equal layers, a rotating one, and one whose head dim affine cannot take."""
    return [
        filled(KVCache()),
        filled(KVCache()),
        filled(RotatingKVCache(128)),
        filled(KVCache(), dim=80),
    ]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """``raw.vkv`` and ``affine.vkv``: the same caches of no model, in two codecs."""
    place = tmp_path_factory.mktemp("files")
    for name, codec in (("raw", "raw"), ("affine", "affine:bits=4")):
        metadata = {"model": "some/model", "odd": "a\x1b[31m\n"}
        vkv.save(place / f"{name}.vkv", caches(), tokens=range(96), codec=codec, metadata=metadata)
    return place


@pytest.fixture(scope="session")
def saved(model, tmp_path_factory):
    """A file that ``vkv save`` wrote."""
    path = tmp_path_factory.mktemp("saved") / "saved.vkv"
    assert main(["save", "--model", str(model), "--prompt", "Hello", "-o", str(path)]) == 0
    return path
