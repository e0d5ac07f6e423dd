"""Every example runs as its first lines say, on a tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import vkv
from fixtures.models import tiny
from vkv.serve import Disk, Server, upstream

EXAMPLES = Path(__file__).parents[1] / "examples"
SYSTEM = "You are the front desk of a small museum of ships. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a tiny llama."""
    return tiny.save_dir(tiny.llama(), tiny.tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example with arguments, in this process; return what it prints."""

    def act(name: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return act


@pytest.fixture
def shipped(run, model, tmp_path):
    """What the first example writes."""
    (tmp_path / "system.txt").write_text(SYSTEM)
    run("ship_prompt.py", model, tmp_path / "system.txt", tmp_path / "sys.vkv")
    return tmp_path / "sys.vkv"


def test_a_prompt_is_shipped_and_a_chat_goes_on(run, model, shipped, tmp_path):
    out = run("resume_chat.py", model, shipped, tmp_path / "turn.vkv")
    assert out.endswith("depends on 1 file\n")
    assert vkv.load(tmp_path / "turn.vkv").tokens[:100] == vkv.load(shipped).tokens[:100]


def test_documents_in_a_store(run, model, tmp_path):
    for name in ("lamp", "keeper"):
        (tmp_path / f"{name}.txt").write_text(f"This is about the {name} of a lighthouse. " * 4)
    out = run("store_documents.py", model, tmp_path, tmp_path / "store")
    assert "keeper: " in out
    hit, total = out.partition(" tokens were stored")[0].splitlines()[-1].split(" of ")
    assert 0.8 * int(total) < int(hit) < int(total)


def test_a_bucket_between_two_machines(run, model, shipped):
    out = run("share_remote.py", model, shipped, "memory://examples/prompts")
    known = vkv.inspect(shipped).tokens
    assert f"\n{known} of " in out


def test_the_openai_client(run, model, tmp_path):
    disk = Disk(tmp_path / "store", min_tokens=32)
    server = Server(upstream.arguments(model=str(model), port=0), disk)
    try:
        server.start()
        out = run("openai_client.py", server.url, model.name)
    finally:
        server.close()
    first, second = (int(line.split("? ")[1].split()[0]) for line in out.splitlines())
    assert first == 0
    assert second > 150


def test_a_reader_without_vkv(run, model, shipped, tmp_path):
    assert "needs ['affine']" in run("read_with_numpy.py", shipped)
    exact = vkv.convert(shipped, tmp_path / "raw.vkv", codec="raw")
    read = runpy.run_path(str(EXAMPLES / "read_with_numpy.py"))
    header, tensors = read["read"](exact.path)
    loaded = vkv.load(exact.path)
    for layer, cache in zip(header["layers"], loaded.cache, strict=True):
        keys = np.array(cache.keys[..., : cache.offset, :].astype(mx.float32))
        np.testing.assert_array_equal(read["rows"](layer, "keys", tensors), keys)


def test_the_notebook(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    book = json.loads((EXAMPLES / "first_look.ipynb").read_text())
    scope: dict[str, object] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), scope)
            if "MODEL" in scope and "model" not in scope:
                scope["MODEL"] = str(model)
    assert len(scope["rest"]) < 20
    assert scope["small"].accounting.bits < 20


def test_every_example_is_listed_and_tested():
    names = {p.name for p in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    page, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for name in names:
        assert f"({name})" in page
        assert name in tests
