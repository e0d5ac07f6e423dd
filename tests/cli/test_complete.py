"""Complete codecs, and ids and names in a store, as a shell asks for them."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete
from vkv_cli.main import cli

import vkv
from fixtures.models import tiny
from vkv.codecs.registry import newest


def proposed(*args, incomplete=""):
    shell = ShellComplete(cli, {}, "vkv", "_VKV_COMPLETE")
    return [item.value for item in shell.get_completions([str(a) for a in args], incomplete)]


@pytest.mark.parametrize("option", ["--codec", "--keys", "--values"])
def test_codecs(option):
    assert sorted(proposed("save", option)) == sorted(newest())
    assert proposed("convert", option, incomplete="aff") == ["affine"]


def test_no_store_is_made_to_complete_from(tmp_path):
    assert proposed("store", "show", "--store", tmp_path / "none") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["show", "rm", "pin", "export"])
def test_ids_and_names_in_a_store(command, tmp_path):
    model = tiny.MODELS["llama"]()
    prompt = vkv.prefill(model, [1, 2, 3])
    with vkv.PromptStore(tmp_path / "store") as store:
        one = store.put(prompt.cache, [1, 2, 3], model=model, name="x1")
    got = proposed("store", command, "--store", tmp_path / "store")
    assert got == [one.id[:12], "x1"]
    args = ("store", command, "--store", tmp_path / "store")
    assert proposed(*args, incomplete=one.id[:3]) == [one.id[:12]]
