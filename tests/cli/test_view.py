"""``vkv view``: what is written, what is refused, and that the page is the one that is built."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

import vkv
from vkv.format.document import open_document

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "fixtures/v1/good"
VIEWER = ROOT / "viewer"


def content(page: Path) -> dict:
    """Return what was put into a page."""
    data = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page.read_text())
    assert data is not None
    return json.loads(base64.b64decode(data[1]))


def test_a_page_holds_the_head_of_a_file_and_no_byte_of_its_tensors(run, tmp_path):
    path, page = GOOD / "affine-grown.vkv", tmp_path / "page.html"
    ran = run("view", path, "-o", page)
    assert (ran.status, ran.err) == (0, "")
    (only,) = content(page)["files"]
    with open_document(path) as document:
        head = document.entries["vkv.header"].stop
    assert base64.b64decode(only["head"]) == path.read_bytes()[:head]
    assert only["size"] == path.stat().st_size


def test_the_page_allows_its_own_script_and_style_and_nothing_else(run, tmp_path):
    page = tmp_path / "page.html"
    run("view", GOOD / "raw-list.vkv", GOOD / "raw-arrays.vkv", "-o", page)
    text = page.read_text()
    assert len(content(page)["files"]) == 2
    assert "default-src 'none'" in text
    for kind in ("script", "style"):
        (body,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)


def test_text_of_a_file_cannot_end_the_element_it_is_in(run, tmp_path):
    hostile = {"</script><script>alert(1)</script>": "<!--\u202e" + "x" * 300_000}
    vkv.save(tmp_path / "a.vkv", vkv.load(GOOD / "raw-kv-f16.vkv"), metadata=hostile)
    run("view", tmp_path / "a.vkv", "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "alert(1)" not in text
    assert text.count("</script>") == 2


@pytest.mark.parametrize("name", ["C8-header-changed", "H1-unsorted", "C6-cut"])
def test_a_bad_file_gives_no_page(run, tmp_path, name):
    ran = run("view", ROOT / f"fixtures/v1/bad/{name}.vkv", "-o", tmp_path / "page.html")
    assert ran.status == 1
    assert f"[{name.split('-')[0]}]" in ran.err
    assert not (tmp_path / "page.html").exists()


def test_three_files_are_wrong_usage(run, tmp_path):
    ran = run("view", "a", "b", "c", "-o", tmp_path / "page.html")
    assert ran.status == 2


@pytest.mark.skipif(
    not (shutil.which("node") and (VIEWER / "node_modules").is_dir()),
    reason="`make viewer` was not run here: no node, or viewer/node_modules is missing",
)
def test_the_page_is_what_its_sources_give(tmp_path):
    subprocess.run(["node", VIEWER / "build.js", tmp_path], check=True, timeout=60)
    for name in ("cli/vkv_cli/view/page.html", "docs/viewer/index.html"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run `make viewer`"


def test_the_lockfile_names_no_host():
    lock = (VIEWER / "package-lock.json").read_text()
    assert '"integrity"' in lock
    assert '"resolved"' not in lock
