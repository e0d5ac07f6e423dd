"""Check the images of a request, and fetch those given by URL within limits."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from vkv.serve import messages
from vkv.serve.body import MAX_BODY
from vkv.serve.connections import TimedReader
from vkv.serve.request_error import RequestError

#: Most pixels of an image: 3 bytes each once decoded.
MAX_PIXELS = 32_000_000
#: Most images of a request.
MAX_IMAGES = 64
#: Seconds for an image to arrive.
TIMEOUT = 10.0


def inline(parts: list[dict[str, Any]], *, fetch: bool) -> bool:
    """Check all images, and replace URLs by ``data:`` URLs with what is there.

    Args:
        parts: Checked messages; changed in place.
        fetch: Fetch from ``http`` and ``https`` URLs; else they are refused.

    Returns:
        True if there is an image.

    Raises:
        RequestError: With the place of the first image at fault.
    """
    found = list(messages.images(parts))
    if len(found) > MAX_IMAGES:
        raise RequestError(f"{len(found)} images, at most {MAX_IMAGES} are read", found[-1][0])
    deadline = time.monotonic() + TIMEOUT
    total = 0
    for at, part, url in found:
        try:
            data = _data(url, fetch=fetch, deadline=deadline, limit=MAX_BODY - total)
            total += len(data)
            kind = _kind(data)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise RequestError(f"{at}: the image cannot be read: {exc}", at) from exc
        part.clear()
        text = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        part.update(type="image_url", image_url={"url": text})
    return bool(found)


def _data(url: str, *, fetch: bool, deadline: float, limit: int) -> bytes:
    head, comma, encoded = url.partition(",")
    if head.startswith("data:"):
        if not comma or not head.endswith(";base64"):
            raise ValueError("expected data:TYPE;base64,DATA")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as exc:
            raise ValueError(f"not base64: {exc}") from None
    if not fetch:
        raise ValueError("expected a data: URL; --allow-image-urls lets this server fetch others")
    return download(url, deadline=deadline, limit=limit)


def _kind(data: bytes) -> str:
    """Return the format of an image, e.g. ``"png"``; decodes its head only."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels, at most {MAX_PIXELS:,}")
        return str(image.format).lower()


def download(url: str, *, deadline: float, limit: int) -> bytes:
    """Fetch a URL from a public address; redirects are not followed.

    Args:
        url: Of scheme ``http`` or ``https``.
        deadline: Of ``time.monotonic``.
        limit: Most bytes.

    Raises:
        OSError, ValueError, http.client.HTTPException: If it cannot be fetched, or must not.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"scheme {parts.scheme[:20]!r}, expected http or https")
    secure = parts.scheme == "https"
    address = public_address(parts.hostname, parts.port or (443 if secure else 80))
    connection = _Connection(parts.hostname, address, deadline, secure=secure)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "image/*"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise ValueError(f"the answer has status {response.status}, expected 200")
            return _read(response, limit)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, limit: int) -> bytes:
    data = bytearray()
    while piece := response.read1(1 << 16):
        data += piece
        if len(data) > limit:
            raise ValueError(f"more than {limit:,} bytes")
    return bytes(data)


def public_address(host: str, port: int) -> tuple[str, int]:
    """Resolve a name to an address that is neither of this machine nor of its networks.

    Raises:
        OSError: If the name is unknown.
        ValueError: If one of its addresses is not public.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(info[4][0]) for info in infos]
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if not address.is_global or address.is_multicast:
            raise ValueError(f"{host[:80]} is at {text}, expected a public address")
    return addresses[0], port


class _Connection(http.client.HTTPConnection):
    """Connect to the address that was checked, whatever the name resolves to by now."""

    def __init__(self, host: str, address: tuple[str, int], deadline: float, *, secure: bool):
        super().__init__(host, address[1], timeout=TIMEOUT)
        self._address, self._deadline, self._secure = address, deadline, secure
        self.response_class = self._response  # type: ignore[assignment]

    def connect(self) -> None:
        """Open the connection."""
        self.sock = socket.create_connection(self._address, _left(self._deadline))
        if self._secure:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

    def _response(self, connection: socket.socket, **options: Any) -> http.client.HTTPResponse:
        timed: Any = _Timed(connection, self._deadline)
        return http.client.HTTPResponse(timed, **options)


class _Timed:
    """Give ``http.client`` a socket whose reads end at a deadline, all together."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection, self._deadline = connection, deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Open the socket for reading."""
        return io.BufferedReader(_TimedFile(self._connection, _left(self._deadline)))


class _TimedFile(TimedReader):
    """Keep the socket open: ``http.client`` closes it before the body is read."""

    def __init__(self, connection: socket.socket, seconds: float):
        super().__init__(connection, seconds)
        self._file = connection.makefile("rb")

    def close(self) -> None:
        """Close the socket."""
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it did not arrive within {TIMEOUT:g} s")
    return left
