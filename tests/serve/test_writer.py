"""The queue of prompts that wait to be written: bounded, newest of a conversation, flushed."""

from __future__ import annotations

import threading

import pytest

from vkv.serve.writer import Job, Writer


def job(text: bytes, *, trims: bool = True, owner: bytes = b"model") -> Job:
    return Job(owner, bytes(b for x in text for b in (x, 0, 0, 0)), trims, [], None, None)


class Slow:
    """A disk that writes nothing before it may; what it wrote, in order."""

    def __init__(self):
        self.busy, self.go = threading.Event(), threading.Event()
        self.done: list[bytes] = []

    def __call__(self, job, progress):
        self.busy.set()
        while not self.go.wait(0.01):
            progress(0, 1)
        self.done.append(job.tokens[::4])


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def writer(slow):
    """Two may wait; one is being written and will not end before ``slow.go``."""
    writer = Writer(slow, size=2)
    writer.offer(job(b"first"))
    assert slow.busy.wait(10)
    yield writer
    slow.go.set()
    writer.close(10)


@pytest.mark.parametrize(
    ("offers", "written"),
    [
        ([job(b"a"), job(b"b")], [b"a", b"b"]),
        ([job(b"a"), job(b"b"), job(b"c")], [b"a", b"b"]),
        ([job(b"a"), job(b"ab"), job(b"abc")], [b"abc"]),
        ([job(b"a"), job(b"ab", owner=b"other")], [b"a", b"ab"]),
        ([job(b"a", trims=False), job(b"ab", trims=False)], [b"a", b"ab"]),
        ([job(b"a", trims=False), job(b"b"), job(b"ab", trims=False)], [b"ab", b"b"]),
    ],
    ids=["wait", "full", "goes on", "other model", "not trimmed", "not trimmed, full"],
)
def test_what_waits(writer, slow, offers, written):
    for offered in offers:
        writer.offer(offered)
    slow.go.set()
    assert writer.close(10) == 0
    assert slow.done == [b"first", *written]
    assert writer.written == len(slow.done)


def test_what_finds_it_full_is_counted_and_told_once(writer, caplog):
    taken = [writer.offer(job(bytes([i]))) for i in range(6)]
    assert taken == [True, True, False, False, False, False]
    assert writer.dropped == 4
    assert [r.levelname for r in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("prompt", "trims", "covered"),
    [
        (b"firsty", True, 5),
        (b"fit", True, 2),
        (b"abcd", True, 3),
        (b"abcd", False, 3),
        (b"abx", False, 0),
        (b"x", True, 0),
    ],
)
def test_what_will_be_found(writer, prompt, trims, covered):
    writer.offer(job(b"abc", trims=trims))
    assert writer.covers(b"model", job(prompt).tokens) == covered
    assert writer.covers(b"other", job(prompt).tokens) == 0


def test_close_gives_up_when_its_time_is_over(writer, slow):
    writer.offer(job(b"a"))
    assert writer.close(0) == 2
    assert not writer.offer(job(b"b"))
    assert slow.done == []
    assert not any(t.name == "vkv-write" for t in threading.enumerate())


def test_a_disk_that_fails_is_told_of_once_and_tried_again(caplog):
    faults = iter([OSError("full"), OSError("full"), None, ValueError("odd")])

    def write(job, progress):
        if (fault := next(faults)) is not None:
            raise fault

    writer = Writer(write)
    for text in (b"a", b"b", b"c", b"d"):
        writer.offer(job(text))
        assert writer.wait(10)
    writer.close(10)
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warned == ["prompts are not stored: full", "prompts are not stored: odd"]
    assert writer.written == 1
