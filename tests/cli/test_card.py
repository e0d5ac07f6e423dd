"""``vkv card``: a README for a model hub that holds nothing but what it should."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from mlx_lm.models.cache import KVCache

import vkv
from vkv.format.schema import ROLES

GOOD = Path(__file__).parents[2] / "fixtures" / "v1" / "good"


def front_matter(text):
    """The lines of the YAML in front of a card, and what follows."""
    empty, yaml, body = text.split("---\n", 2)
    assert empty == ""
    return yaml.splitlines(), body


def test_a_card_and_its_picture(run, files, tmp_path):
    path, info = files / "affine.vkv", vkv.inspect(files / "affine.vkv")
    ran = run("card", path, "-o", tmp_path / "hub")
    assert (ran.status, ran.err) == (0, "")
    text = (tmp_path / "hub" / "README.md").read_text()
    yaml, body = front_matter(text)
    assert yaml[:2] == ["library_name: vkv", 'base_model: "some/model"']
    assert '- "affine"' in yaml
    for words in (info.id, f"{info.size:,} bytes", "affine 4, 3 layers", 'vkv.load("affine.vkv"'):
        assert words in body
    assert str(files) not in text
    root = ElementTree.parse(tmp_path / "hub" / "bytes.svg").getroot()
    labels = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    counts = {t.split(":")[0]: int(t.split()[1].replace(",", "")) for t in labels}
    assert sum(counts.values()) == info.size
    assert counts.keys() <= {*ROLES, "header"}
    assert "](bytes.svg)" in body
    again = run("card", path, "-o", tmp_path / "hub")
    assert again.status == 1
    assert "exists; pass --force" in again.err
    assert run("card", path, "-o", tmp_path / "hub", "--force").status == 0


@pytest.mark.parametrize(
    "name", ["/home/me/private/model", "../model", "x", "a/b/c", "~/m\n- x: y"]
)
def test_a_path_of_the_author_is_not_written(run, tmp_path, name):
    vkv.save(tmp_path / "a.vkv", [KVCache()], metadata={"model": name})
    ran = run("card", tmp_path / "a.vkv")
    assert ran.status == 0
    assert "base_model" not in ran.out
    assert "private" not in ran.out


@pytest.mark.parametrize("name", ["checkpoints-affine", "basis-child", "basis", "raw-kv-empty"])
def test_every_kind_of_file_has_a_card(run, name):
    ran = run("card", GOOD / f"{name}.vkv")
    assert ran.status == 0
    info = vkv.inspect(GOOD / f"{name}.vkv")
    assert ("| checkpoints | after 3, 6 tokens |" in ran.out) is bool(info.header.checkpoints)
    assert all(key in ran.out for key in info.dependencies)
