"""The queue between handlers and the generation thread."""

from __future__ import annotations

from queue import Empty, Queue
from types import SimpleNamespace

import pytest

from vkv.serve.answers import Client, Requests


class Context:
    stopped = False

    def stop(self):
        self.stopped = True


@pytest.fixture
def asked():
    """Return a queue, a client, and what its handler reads."""
    return Requests(), Client(), Queue()


def put(requests, client, out):
    requests.put((out, SimpleNamespace(client=client), "arguments"))


def test_answers_arrive_in_order(asked):
    requests, _, out = asked
    put(*asked)
    answers, request, arguments = requests.get()
    for item in ("text", None):
        answers.put(item)
    assert (request.client, arguments) == (asked[1], "arguments")
    assert [out.get_nowait(), out.get_nowait()] == ["text", None]


@pytest.mark.parametrize("before", [True, False], ids=["before it is queued", "while it waits"])
def test_a_client_that_left_is_never_served(asked, before):
    requests, client, out = asked
    gone = ConnectionAbortedError("gone")
    if before:
        requests.cancel(client, gone)
    put(*asked)
    requests.cancel(client, gone)
    assert isinstance(out.get_nowait(), ConnectionAbortedError)
    with pytest.raises(Empty):
        requests.get_nowait()


def test_a_client_that_leaves_stops_its_context(asked):
    requests, client, out = asked
    put(*asked)
    answers, context = requests.get()[0], Context()
    answers.put(context)
    requests.cancel(client, ConnectionAbortedError("gone"))
    answers.put("text")
    assert context.stopped
    assert [out.get_nowait(), str(out.get_nowait())] == [context, "gone"]
    assert out.empty()


def test_a_context_that_comes_after_is_stopped_and_one_alone_ends(asked):
    requests, client, _ = asked
    put(*asked)
    answers, context = requests.get()[0], Context()
    requests.cancel(client, ConnectionAbortedError("gone"))
    answers.put(context)
    assert context.stopped
    answers.alone = True
    with pytest.raises(ConnectionAbortedError):
        answers.put((1, 2))
    answers.put(None)


def test_a_fault_fails_those_that_were_taken(asked):
    requests, client, out = asked
    waiting = Queue()
    put(*asked)
    requests.get()
    put(requests, client, waiting)
    requests.fail(RuntimeError("fault"))
    assert str(out.get_nowait()) == "fault"
    assert waiting.empty()
    requests.close(RuntimeError("closed"))
    assert str(waiting.get_nowait()) == "closed"
    put(requests, client, late := Queue())
    assert str(late.get_nowait()) == "closed"
