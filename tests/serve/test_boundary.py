"""Which sites may use a server: the headers Host, Origin and Content-Type."""

from __future__ import annotations

import json

import pytest

from tests.helpers.http_client import TEXT, send
from vkv.serve.boundary import check_site, check_type, is_own
from vkv.serve.request_error import RequestError


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LOCALHOST:8080", True),
        ("localhost.", True),
        ("a.localhost:1", True),
        ("127.0.0.1", True),
        ("127.9.9.9:80", True),
        ("[::1]:8080", True),
        ("[::ffff:127.0.0.1]", True),
        ("10.0.0.5:8080", True),
        ("10.0.0.6", False),
        ("box.lan", True),
        ("BOX.lan:8080", True),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("notlocalhost", False),
        ("", False),
        ("[", False),
        ("[::1", False),
    ],
)
def test_names_of_this_machine(host, own):
    assert is_own(host, "10.0.0.5", ["box.lan"]) is own


def status_of(check, *args, **options):
    try:
        check(*args, **options)
    except RequestError as exc:
        return exc.status
    return 200


@pytest.mark.parametrize(
    ("host", "origin", "origins", "allowed"),
    [
        ("localhost:8080", None, [], True),
        (None, None, [], True),
        ("localhost:8080", "http://localhost:8080", [], True),
        ("localhost:8080", "http://LOCALHOST:8080", [], True),
        ("localhost:8080", "http://localhost:3000", [], False),
        ("localhost:8080", "http://localhost:3000", ["http://localhost:3000"], True),
        ("localhost:8080", "https://evil.example", [], False),
        ("localhost:8080", "https://evil.example", ["*"], True),
        ("localhost:8080", "null", [], False),
        ("localhost:8080", "", [], False),
        ("localhost:8080", "file://localhost:8080", [], False),
        (None, "http://localhost", [], False),
        ("evil.example", "http://evil.example", ["*"], False),
    ],
)
def test_pages(host, origin, origins, allowed):
    headers = {k: v for k, v in (("Host", host), ("Origin", origin)) if v is not None}
    assert status_of(check_site, headers, local="127.0.0.1", hosts=[], origins=origins) == (
        200 if allowed else 403
    )


@pytest.mark.parametrize(
    ("declared", "origin", "allowed"),
    [
        ("application/json", None, True),
        ("Application/JSON; charset=utf-8", "http://a", True),
        (None, None, True),
        (None, "http://a", False),
        ("text/plain", None, False),
        ("application/x-www-form-urlencoded", None, False),
        ("application/jsonp", None, False),
    ],
)
def test_types(declared, origin, allowed):
    headers = {k: v for k, v in (("Content-Type", declared), ("Origin", origin)) if v is not None}
    assert status_of(check_type, headers) == (200 if allowed else 415)


BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "box.lan"}, 200),
        ({"Origin": "https://good.example"}, 200),
    ],
)
def test_a_server_asks_both(guarded, method, headers, status):
    path = TEXT if method == "POST" else "/v1/models"
    headers = {"Content-Type": "application/json"} | headers
    got, data = send(guarded.url, path, BODY, method=method, headers=headers)
    assert got == (204 if (method, status) == ("OPTIONS", 200) else status)
    if status == 403:
        assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def guarded(run_server):
    flags = {"allowed_hosts": ["box.lan"], "allowed_origins": ["https://good.example"]}
    with run_server(flags) as server:
        yield server


def test_a_form_of_another_page_is_not_computed(guarded):
    before = len(guarded.models[0]._prompts)
    status, _ = send(guarded.url, TEXT, BODY, headers={"Content-Type": "text/plain"})
    assert (status, len(guarded.models[0]._prompts)) == (415, before)
