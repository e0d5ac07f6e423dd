"""A save that is killed, runs out of disk or meets others leaves an old or a new file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

import vkv
from vkv.errors import VkvError
from vkv.format.container_write import write_all
from vkv.format.document import open_document

ROOT = Path(__file__).parents[1]
GOOD = ROOT / "fixtures" / "v1" / "good" / "raw-kv-f16.vkv"


def litter(folder: Path) -> list[str]:
    return [n for n in os.listdir(folder) if n.endswith(".vkv-tmp")]


def child(code: str, *args: object, **options: Any) -> subprocess.Popen[Any]:
    """A Python process of its own, with the package on its path."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, **options)


@pytest.mark.parametrize(
    ("options", "rule"), [({"created": 5}, "H2"), ({"metadata": {"a": "\ud800"}}, "H1")]
)
def test_file_that_no_reader_would_take_does_not_replace_one(tmp_path, options, rule):
    path = tmp_path / "a.vkv"
    vkv.save(path, [KVCache()])
    old = path.read_bytes()
    with pytest.raises(VkvError) as caught:
        vkv.save(path, [KVCache()], **options)
    assert caught.value.rule == rule
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.vkv"]


#: Saves files of 2 MB over one another as fast as it can, all of one byte each.
SAVES = """if True:
    import sys
    from vkv._atomic import replacing
    from vkv.format import container_write, header, schema

    def save(path, byte):
        forms = [(f"t{i}", "U8", (1, 1 << 18)) for i in range(8)]
        runs = {n: schema.Segment(codec="raw", version=1, params={"dtype": "U8"}, parts={"data": n})
                for n, _, _ in forms}
        tensors = {n: schema.Tensor(dtype="U8", shape=s, segments=(runs[n],)) for n, _, s in forms}
        def head(digests):
            stored = {n: schema.Stored(role="payload", dtype=d, shape=s, digest=x)
                      for (n, d, s), x in zip(forms, digests)}
            layer = schema.Layer(kind="kv", tensors=tensors)
            return header.dump(schema.Header(version="1.0", producer=str(byte), layers=(layer,),
                                             tensors=stored))
        loads = [(f, lambda: bytes([byte]) * (1 << 18)) for f in forms]
        with replacing(path, durable=False) as fd:
            container_write.write(fd, loads, head)

    def saves(path, start, count):
        for i in range(start, start + count):
            save(path, i % 256)

    if len(sys.argv) > 2:
        saves(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
#: Forks a process that saves for each number it is told, and says its id, then that it died.
FORKS = """if True:
    import os
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            saves(sys.argv[1], int(line), 1 << 30)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
"""


#: Lets no file grow beyond so many bytes, as a full disk does, and goes on as another script.
FULL = """if True:
    import errno, resource, signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop()), resource.RLIM_INFINITY))
    try:
        exec(sys.argv.pop())
    except OSError as exc:
        sys.exit(7 if exc.errno == errno.EFBIG else 8)
"""
SAVE_LIVE = """if True:
    import sys
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache
    import vkv
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, 100, 64)), mx.ones((1, 2, 100, 64)))
    vkv.save(sys.argv[1], [cache])
"""


@pytest.mark.parametrize("room", [0, 300, 1 << 20])
def test_full_disk_leaves_the_old_file(tmp_path, room):
    check_full(tmp_path / "a.vkv", SAVES, room)


@pytest.mark.hostile
def test_full_disk_under_a_save_of_live_caches(tmp_path):
    check_full(tmp_path / "a.vkv", SAVE_LIVE, 60_000)


def check_full(path: Path, script: str, room: int) -> None:
    path.write_bytes(GOOD.read_bytes())
    full = child(FULL, path, 0, 1, script, room, stdout=subprocess.DEVNULL)
    assert full.wait() == 7
    assert path.read_bytes() == GOOD.read_bytes()
    assert os.listdir(path.parent) == ["a.vkv"]


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full here")
def test_full_device_is_an_os_error():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_all(fd, b"x", 0)
    finally:
        os.close(fd)


def whole(path: Path) -> int:
    """Check that the file is one that was saved, with nothing of another in it; which one."""
    with open_document(path) as document:
        byte = int(document.header.producer)
        for name in document.header.tensors:
            assert document.read(name) == bytes([byte]) * (1 << 18)
    return byte


@pytest.mark.hostile
def test_a_hundred_kills_leave_an_old_or_a_new_file(tmp_path):
    path = tmp_path / "a.vkv"
    assert child(SAVES, path, 0, 1).wait() == 0
    moments, seen, left = random.Random(0), set(), 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with child(f"{SAVES}\n{FORKS}", path, **pipes) as forks:
        for i in range(100):
            forks.stdin.write(f"{i}\n")
            pid, before = int(forks.stdout.readline()), path.stat().st_ino
            while i % 2 and path.stat().st_ino == before:
                time.sleep(0.001)  # every other one is let finish at least one file
            time.sleep(moments.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert forks.stdout.readline() == "gone\n"
            seen.add(whole(path))
            left += len(litter(tmp_path))
    print(f"{len(seen)} different files seen, {left} times one left unfinished")
    assert len(seen) > 40  # the kills did not all come before the first save
    assert left > 10  # ... and did come while one was being written
    assert child(SAVES, path, 7, 1).wait() == 0
    assert whole(path) == 7
    assert os.listdir(tmp_path) == ["a.vkv"]


@pytest.mark.hostile
def test_kills_of_a_save_of_live_caches(tmp_path):
    """The same through ``vkv.save``, a few times: the process takes a second to start."""
    code = """if True:
        import sys
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache
        import vkv
        print("ready", flush=True)
        for n in range(1, 1 << 30):
            cache = KVCache()
            x = mx.full((1, 2, 500, 64), float(n))
            cache.update_and_fetch(x, x)
            vkv.save(sys.argv[1], [cache], tokens=[n] * 500, codec="affine:bits=8")
    """
    path = tmp_path / "a.vkv"
    moments = random.Random(1)
    for _ in range(2):
        process = child(code, path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not path.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        prompt = vkv.load(path)
        assert len(set(prompt.tokens)) == 1
        assert vkv.validate(path, deep=True).ok
        assert prompt.cache[0].keys.max().item() == prompt.tokens[0]
    vkv.save(path, [KVCache()])
    assert os.listdir(tmp_path) == ["a.vkv"]


@pytest.mark.hostile
def test_four_processes_save_one_path(tmp_path):
    path = tmp_path / "a.vkv"
    writers = [child(SAVES, path, i, 25) for i in range(4)]
    checks = 0
    while any(w.poll() is None for w in writers):
        if path.exists():
            whole(path)
            checks += 1
    assert [w.wait() for w in writers] == [0, 0, 0, 0]
    assert checks > 3
    whole(path)
    assert os.listdir(tmp_path) == ["a.vkv"]
