"""Requests to a server of this machine, well-formed and otherwise."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


def send(
    url: str,
    path: str = TEXT,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    timeout: float = 60,
) -> tuple[int, bytes]:
    """Return the status and the body of an answer; ``body`` is bytes, or becomes JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data if method == "POST" else None, headers or JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connect(url: str, data: bytes = b"", timeout: float = 30) -> socket.socket:
    """Open a connection and send ``data``."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=timeout)
    connection.sendall(data)
    return connection


def request_bytes(body: Any, path: str = TEXT, *, extra: str = "", length: int = -1) -> bytes:
    """Write a POST request by hand; a ``length`` other than that of the body may be given."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length < 0 else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n{extra}\r\n".encode() + data


def receive(connection: socket.socket) -> bytes:
    """Read until the server closes the connection, then close it here too."""
    pieces = []
    with connection:
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)
