"""Carry an error from the rank that met it to all others."""

from __future__ import annotations

from typing import Any

import msgspec

from vkv import errors
from vkv.errors import VkvError


def report(exc: BaseException) -> bytes:
    """Return an error as bytes: its class, and what it says."""
    if isinstance(exc, VkvError):
        body: tuple[Any, ...] = (type(exc).__name__, exc.args, exc.__dict__)
    elif isinstance(exc, OSError):
        name = None if exc.filename is None else str(exc.filename)
        body = ("OSError", (exc.errno or 0, exc.strerror or str(exc), name), {})
    else:
        body = ("", (f"{type(exc).__name__}: {exc}",), {})
    return msgspec.msgpack.encode(body, enc_hook=str)


def rebuilt(raw: bytes, rank: int) -> Exception:
    """Return the error that ``rank`` reported: of the same class where it is one of vkv's."""
    name, args, state = msgspec.msgpack.decode(raw)
    if name == "OSError":
        return OSError(*args)
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if kind is None:
        return VkvError(f"rank {rank} failed: {args[0]}")
    return errors.rebuilt(kind, args, state)
