"""The wheel holds what it should, its page has no dead links, and deployment files are sound."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

import vkv

ROOT = Path(__file__).parents[1]


def succeed(*command: str | Path) -> None:
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the checkout with the tools that are installed."""
    out = tmp_path_factory.mktemp("dist")
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    succeed(sys.executable, *build)
    (path,) = out.glob("*.whl")
    return path


def test_tools_of_the_index_accept_the_wheel(wheel):
    succeed(sys.executable, "-m", "twine", "check", "--strict", wheel)
    succeed(sys.executable, "-m", "check_wheel_contents", "--config", "pyproject.toml", wheel)


def test_every_module_is_in_the_wheel_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        str(path.relative_to(root))
        for root, package in ((ROOT, "vkv"), (ROOT / "cli", "vkv_cli"))
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert names == expected
    assert "vkv/py.typed" in names


def test_the_page_on_the_index_has_no_relative_links(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = BytesParser().parsebytes(archive.read(name))
    page = str(metadata.get_payload())
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", page) == []
    assert "`docs/python.md`" in page
    assert metadata["Version"] == vkv.__version__
    assert metadata["Author"] == "The vkv authors"


def test_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"version: {vkv.__version__}\n" in text


def test_extras_are_all_described():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set((ROOT / "README.md").read_text().split("## Three commands")[0].split('".[')[1:])
    for extra in {text.split("]")[0] for text in named}:
        assert extra in extras["optional-dependencies"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "vkv-serve.service"
    text = (ROOT / "deploy" / unit.name).read_text()
    unit.write_text(text.replace("/opt/vkv/bin/vkv", sys.executable))
    succeed("systemd-analyze", "verify", unit)


def test_deployment_uses_flags_that_exist():
    from vkv_cli.commands.serve import serve

    known = {flag for parameter in serve.params for flag in parameter.opts}
    for name in ("vkv-serve.service", "Dockerfile"):
        text = (ROOT / "deploy" / name).read_text()
        started = [line for line in text.splitlines() if line.startswith(("ExecStart", "ENTRY"))]
        flags = set(re.findall(r"--[a-z-]+", " ".join(started)))
        assert flags
        assert flags <= known
