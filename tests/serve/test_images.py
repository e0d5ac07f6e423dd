"""Images of a request: no connection without leave, and then within limits."""

from __future__ import annotations

import base64
import http.server
import io
import json
import socket
import threading
import time

import pytest

from tests.helpers.http_client import CHAT, send
from vkv.serve import images
from vkv.serve.request_error import RequestError

pytest.importorskip("PIL")
from PIL import Image


def png(width=4, height=3):
    data = io.BytesIO()
    Image.new("L", (width, height)).save(data, "PNG")
    return data.getvalue()


def message(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("leave", [False, True])
def test_a_text_model_refuses_images_and_opens_no_connection(run_server, leave):
    with socket.create_server(("127.0.0.1", 0)) as asked:
        asked.settimeout(0.5)
        url = f"http://127.0.0.1:{asked.getsockname()[1]}/a.png"
        with run_server({"allow_image_urls": leave}) as server:
            status, data = send(server.url, CHAT, {"messages": message(url)})
        assert (status, json.loads(data)["error"]["param"]) == (400, "messages[0].content[0]")
        with pytest.raises(TimeoutError):
            asked.accept()


def test_data_urls_are_checked_and_kept():
    sent = message(data_url(png()))
    assert images.inline(sent, fetch=False)
    assert sent == message(data_url(png()))
    assert not images.inline([{"role": "user", "content": "text"}], fetch=False)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org/a.png", "--allow-image-urls"),
        ("file:///etc/passwd", "--allow-image-urls"),
        ("data:image/png,abc", "expected data:TYPE;base64,DATA"),
        ("data:image/png;base64,***", "not base64"),
        (data_url(b"no image"), "cannot identify"),
        (data_url(png(8000, 8000)), "8000 x 8000 pixels"),
    ],
)
def test_images_that_are_refused(url, words):
    with pytest.raises(RequestError, match=words) as refused:
        images.inline(message(url), fetch=False)
    assert refused.value.param == "messages[0].content[0]"


def test_too_many_images():
    with pytest.raises(RequestError, match="65 images, at most 64"):
        images.inline(message(data_url(png())) * 65, fetch=False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "::1", "0.0.0.0", "10.1.2.3", "192.168.1.1", "172.16.0.1",
     "169.254.169.254", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1", "fd00::1", "224.0.0.1",
     "100.64.0.1", "2130706433"],
)  # fmt: skip
def test_addresses_that_are_not_public(host):
    with pytest.raises(ValueError, match="expected a public address"):
        images.public_address(host, 80)


@pytest.mark.parametrize("url", ["ftp://example.org/a", "http:///a", "gopher://x", "//x/a", "x"])
def test_other_schemes(url):
    with pytest.raises(ValueError, match="expected http or https"):
        images.download(url, deadline=time.monotonic() + 5, limit=100)


class Site(http.server.BaseHTTPRequestHandler):
    """A public site, for these tests."""

    def do_GET(self):
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1/")
        else:
            self.send_response(200)
        self.end_headers()
        if self.path == "/a.png?x=1":
            self.wfile.write(png())
        while self.path in ("/endless", "/slow"):
            try:
                self.wfile.write(b"x" * (1 << 16 if self.path == "/endless" else 1))
            except OSError:
                return
            time.sleep(0.05 if self.path == "/slow" else 0)

    def log_message(self, *args):
        pass


@pytest.fixture
def site(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(images, "public_address", lambda host, port: server.server_address)
    yield "http://images.example"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_image_of_a_public_site(site):
    sent = message(f"{site}/a.png?x=1")
    assert images.inline(sent, fetch=True)
    assert sent == message(data_url(png()))


@pytest.mark.parametrize(
    ("path", "words"),
    [("/moved", "status 302, expected 200"), ("/endless", "more than 100,000 bytes"),
     ("/slow", "did not arrive|timed out"), ("/text", "cannot identify")],
)  # fmt: skip
def test_sites_that_are_given_up(site, monkeypatch, path, words):
    monkeypatch.setattr(images, "MAX_BODY", 100_000)
    monkeypatch.setattr(images, "TIMEOUT", 0.5)
    start = time.monotonic()
    with pytest.raises(RequestError, match=words):
        images.inline(message(site + path), fetch=True)
    assert time.monotonic() - start < 5
