"""Turn what fsspec and its back ends raise into one line that names the URL."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from vkv.errors import VkvError
from vkv.sources.urls import shown

#: Characters of what a back end says that a message has.
MAX_REASON = 200
INSTALL = "pip install 'vkv[remote]'"


@contextlib.contextmanager
def naming(url: str) -> Iterator[None]:
    """Turn whatever fsspec and its back ends raise into one line that names ``url``.

    Raises:
        OSError: Of the class that fits, with ``filename`` the URL.
        VkvError: A package is missing, or the scheme is unknown.
    """
    try:
        yield
    except VkvError:
        raise
    except ImportError as exc:
        raise VkvError(f"a package is missing ({_line(exc)}): {INSTALL}", at=shown(url)) from None
    except ValueError as exc:  # "Protocol not known: x"
        raise VkvError(_line(exc), at=shown(url)) from None
    except Exception as exc:
        number, reason = _reason(exc)
        raise OSError(number, _one_line(reason), shown(url)) from exc


#: By the name of the class, so that no back end is imported to look for it.
_WORDS = {
    "FileNotFoundError": (errno.ENOENT, "not found"),
    "RepositoryNotFoundError": (errno.ENOENT, "no such repository"),
    "GatedRepoError": (errno.EACCES, "its authors ask to be asked for access"),
    "PermissionError": (errno.EACCES, "access denied"),
    "NoCredentialsError": (errno.EACCES, "no credentials in the environment"),
    "TimeoutError": (errno.ETIMEDOUT, "no answer in time"),
    "ServerDisconnectedError": (errno.ECONNRESET, "the connection was cut"),
    "ClientPayloadError": (errno.ECONNRESET, "the connection was cut"),
    "ConnectionResetError": (errno.ECONNRESET, "the connection was cut"),
    "ClientConnectorError": (errno.ECONNREFUSED, "cannot be reached"),
    "EndpointConnectionError": (errno.ECONNREFUSED, "cannot be reached"),
}
_STATUS = {
    401: "PermissionError",
    403: "PermissionError",
    404: "FileNotFoundError",
    410: "FileNotFoundError",
}


def _reason(exc: Exception) -> tuple[int, str]:
    """Error number and words for what a back end raised."""
    status = getattr(exc, "status", None)
    if isinstance(status, int):
        number, words = _WORDS[_STATUS[status]] if status in _STATUS else (errno.EIO, "refused")
        return number, f"{words}: HTTP {status} {getattr(exc, 'message', '')}".rstrip()
    for cls in type(exc).__mro__:
        if cls.__name__ in _WORDS:
            number, words = _WORDS[cls.__name__]
            return number, f"{words}: {_line(exc)}" if number == errno.ECONNREFUSED else words
    if isinstance(exc, OSError):
        return exc.errno or errno.EIO, exc.strerror or _line(exc)
    return errno.EIO, _line(exc)


def _line(exc: Exception) -> str:
    return _one_line(str(exc)) or type(exc).__name__


def _one_line(text: str) -> str:
    """Return what a server may have said, printable and not long."""
    line = " ".join(text[:10_000].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"
