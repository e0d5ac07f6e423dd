"""Refuse requests that a web page of another site makes a browser send."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from vkv.serve.request_error import RequestError


def check_site(
    headers: Mapping[str, str], *, local: str, hosts: Iterable[str], origins: Iterable[str]
) -> None:
    """Check ``Host`` and ``Origin``.

    A page of another site can make a browser send requests, and after DNS rebinding (its
    name then resolves to this machine) it can read the answers too. ``Host`` tells the
    name that the browser asked for, ``Origin`` the page.

    Args:
        headers: Of the request.
        local: The address of this machine that the connection came to.
        hosts: Names of this server, besides loopback ones and ``local``.
        origins: Pages that may use it; ``"*"`` stands for all.

    Raises:
        RequestError: Status 403, if one of them is of another site.
    """
    host = headers.get("Host")
    if host is not None and not is_own(host, local, hosts):
        raise RequestError(
            f"Host is {host[:80]!r}, expected this machine; --allowed-host adds a name", status=403
        )
    origin, allowed = headers.get("Origin"), set(origins)
    if origin is None or origin in allowed or "*" in allowed:
        return
    if host is None or _site(origin) != host.lower():
        text = f"Origin is {origin[:80]!r}, expected none; --allowed-origins adds a page"
        raise RequestError(text, status=403)


def is_own(host: str, local: str, hosts: Iterable[str]) -> bool:
    """Return True if ``host``, with or without a port, is a name of this server."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in {x.lower() for x in hosts} or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = _address(name)
        return address.is_loopback or address == _address(local.partition("%")[0])
    except ValueError:
        return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address; one of IPv4 within IPv6 (``::ffff:127.0.0.1``) is that of IPv4."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def _site(origin: str) -> str | None:
    scheme, _, host = origin.partition("://")
    return host.lower() if scheme in ("http", "https") else None


def check_type(headers: Mapping[str, str]) -> None:
    """Check that the body is declared as JSON, which a form of another page cannot do.

    Raises:
        RequestError: Status 415, if ``Content-Type`` is another type.
    """
    declared = headers.get("Content-Type")
    if declared is None and headers.get("Origin") is None:
        return  # not a browser
    if (declared or "").partition(";")[0].strip().lower() != "application/json":
        text = f"Content-Type is {(declared or 'missing')[:80]}, expected application/json"
        raise RequestError(text, status=415)
