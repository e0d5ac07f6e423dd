"""What a server says of requests: one line each."""

from __future__ import annotations

import logging
import re
import time

from tests.helpers.http_client import TEXT, send
from vkv.serve import upstream


def test_a_request_is_one_line(serving, caplog):
    root = logging.getLogger()
    caplog.handler.addFilter(upstream.without_progress)
    try:
        with serving() as server, caplog.at_level(logging.INFO), caplog.at_level("INFO", root.name):
            for stream in (False, True):
                body = {"prompt": "The light is red. " * 4, "max_tokens": 3, "stream": stream}
                assert send(server.url, TEXT, body)[0] == 200
            assert send(server.url, TEXT, {"prompt": 1})[0] == 400
            deadline = time.monotonic() + 10
            while len(said := lines(caplog)) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        caplog.handler.removeFilter(upstream.without_progress)
    first, again, refused = said
    assert re.search(r" 72 tokens, 0 cached, first token \d+\.\d s, \d generated$", first)
    assert re.search(r" 72 tokens, 7[01] cached, first token \d+\.\d s, \d generated$", again)
    assert '"POST /v1/completions HTTP/1.1" 400' in refused


def lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "tokens stored" not in r.getMessage()]
