"""A file takes its name in one step: replaced, failed, linked, forbidden."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vkv import _atomic
from vkv._atomic import replacing, temporary_name

ROOT = Path(__file__).parents[1]


def write(path: Path, data: bytes, pieces: int = 1, **options: Any) -> None:
    size = -(-len(data) // pieces)
    with replacing(path, **options) as fd:
        for i in range(pieces):
            os.write(fd, data[i * size : (i + 1) * size])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def litter(folder: Path) -> list[str]:
    return [n for n in os.listdir(folder) if n.endswith(".vkv-tmp")]


@pytest.mark.parametrize("durable", [True, False])
def test_new_and_replaced(tmp_path, durable):
    path = tmp_path / "a.vkv"
    write(path, b"old", durable=durable)
    assert path.read_bytes() == b"old"
    write(path, b"newer", durable=durable)
    assert path.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["a.vkv"]


def test_readers_of_the_old_file_keep_it(tmp_path):
    write(tmp_path / "a.vkv", b"old")
    with (tmp_path / "a.vkv").open("rb") as reader:
        write(tmp_path / "a.vkv", b"newer")
        assert reader.read() == b"old"


def test_error_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "a.vkv"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(path, error)
        assert os.listdir(tmp_path) == []
    write(path, b"old")
    with pytest.raises(ValueError):  # noqa: PT011  # any
        fail(path, ValueError)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.vkv"]


def fail(path: Path, error: type[BaseException]) -> None:
    with replacing(path) as fd:
        os.write(fd, b"half")
        raise error


def test_only_the_owner_may_read_a_prompt(tmp_path):
    previous = os.umask(0)
    try:
        write(tmp_path / "a.vkv", b"x")
        assert mode(tmp_path / "a.vkv") == 0o600
        with replacing(tmp_path / "b.vkv"):
            (name,) = litter(tmp_path)
            assert mode(tmp_path / name) == 0o600
    finally:
        os.umask(previous)


def test_mode_of_the_file_replaced_stays(tmp_path):
    path = tmp_path / "a.vkv"
    write(path, b"x")
    path.chmod(0o640)
    write(path, b"y")
    assert mode(path) == 0o640


def test_litter_of_a_long_name_is_swept(tmp_path):
    target = tmp_path / ("x" * 255)
    (tmp_path / temporary_name(target.name)).write_bytes(b"left by a dead writer")
    (tmp_path / temporary_name("y" * 255)).write_bytes(b"of another file")
    write(target, b"x")
    assert litter(tmp_path) != []
    write(tmp_path / ("y" * 255), b"y")
    assert litter(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to others")
def test_owner_and_group_of_the_file_replaced_stay(tmp_path):
    path = tmp_path / "a.vkv"
    write(path, b"x")
    os.chown(path, 1000, 2000)
    path.chmod(0o640)
    write(path, b"y")
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode(path)) == (1000, 2000, 0o640)


def test_where_the_group_cannot_stay_nobody_else_gets_access(tmp_path, monkeypatch):
    path = tmp_path / "a.vkv"
    write(path, b"x")
    path.chmod(0o640)
    old = path.stat()

    def refuse(fd, uid, gid):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    group = os.stat_result((*old[:5], old.st_gid + 1, *old[6:]))
    with (tmp_path / "b.vkv").open("wb") as file:
        _atomic._hand_on(group, file.fileno())
    assert mode(tmp_path / "b.vkv") == 0o600


def test_a_directory_that_cannot_be_flushed_is_said_and_the_file_is_whole(tmp_path, monkeypatch):
    fsync = os.fsync

    def as_on_cifs(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", as_on_cifs)
    with pytest.warns(UserWarning, match="cannot flush a directory"):
        write(tmp_path / "a.vkv", b"x")
    assert (tmp_path / "a.vkv").read_bytes() == b"x"


def test_symbolic_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "a.vkv"
    link.symlink_to(tmp_path / "real" / "b.vkv")
    for data in (b"new", b"newer"):  # first to nothing, then to a file
        write(link, data)
        assert link.is_symlink()
        assert (tmp_path / "real" / "b.vkv").read_bytes() == data
    assert os.listdir(tmp_path / "real") == ["b.vkv"]


def test_relative_paths_and_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.vkv", "[x]*?.vkv", " .vkv", "ä\n.vkv", "x" * 200, "x" * 255, "会" * 85):
        write(Path(name), b"x")
        write(Path(name), b"y")
        assert Path(name).read_bytes() == b"y"
    assert litter(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "error"),
    [("missing/a.vkv", FileNotFoundError), ("file/a.vkv", NotADirectoryError),
     ("folder", IsADirectoryError)],
)  # fmt: skip
def test_places_that_take_no_file(tmp_path, place, error):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(error):
        write(tmp_path / place, b"x")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def child(code: str, *args: object, **options: Any) -> subprocess.Popen[Any]:
    """A Python process of its own, with the package on its path."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, **options)


def test_directory_that_may_not_be_written():
    """As nobody, since root may write everywhere; not in pytest's folder, which is root's."""
    folder = Path(tempfile.mkdtemp(prefix="vkv-"))
    write(folder / "a.vkv", b"old")
    (folder / "a.vkv").chmod(0o644)
    folder.chmod(0o555)
    code = """if True:
        import os, sys
        from vkv._atomic import replacing
        if os.getuid() == 0:
            os.setegid(65534), os.seteuid(65534)
        assert open(sys.argv[1], "rb").read() == b"old"
        try:
            with replacing(sys.argv[1]) as fd:
                os.write(fd, b"new")
        except PermissionError:
            sys.exit(7)
    """
    try:
        assert child(code, folder / "a.vkv").wait() == 7
        assert (folder / "a.vkv").read_bytes() == b"old"
        assert os.listdir(folder) == ["a.vkv"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_file_of_a_living_writer_is_not_swept(tmp_path):
    path = tmp_path / "a.vkv"
    with replacing(path) as fd:
        os.write(fd, b"slow")
        write(path, b"quick")
        assert len(litter(tmp_path)) == 1
    assert path.read_bytes() == b"slow"


def test_only_files_of_the_same_path_are_swept(tmp_path):
    dead = {".a.vkv.1-00000000.vkv-tmp", ".a.vkv.99999999-ffffffff.vkv-tmp"}
    others = {".b.vkv.1-00000000.vkv-tmp", ".a.vkv.x.1-00000000.vkv-tmp", ".a.vkv.vkv-tmp",
              "a.vkv.1-00000000.vkv-tmp"}  # fmt: skip
    for name in dead | others:
        (tmp_path / name).write_bytes(b"x")
    write(tmp_path / "a.vkv", b"y")
    assert set(os.listdir(tmp_path)) == {"a.vkv"} | others


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        write(tmp_path / "pipe", b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    path = tmp_path / "a.vkv"
    for given, named in ((None, path), ("other", "other")):
        with pytest.raises(OSError, match="No space left") as caught, replacing(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), given)
        assert caught.value.filename == os.fspath(named)
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "no" / "a.vkv"):
        pass
    assert caught.value.filename == os.fspath(tmp_path / "no" / "a.vkv")


def test_a_full_disk_names_the_file_that_was_to_be_written(tmp_path):
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        write(tmp_path / "a.vkv", bytes(50))
        with pytest.raises(OSError, match="File too large") as caught:
            write(tmp_path / "a.vkv", bytes(200), pieces=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.filename == os.fspath(tmp_path / "a.vkv")
    assert os.listdir(tmp_path) == ["a.vkv"]
