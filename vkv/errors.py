"""Define the errors that vkv raises.

::

    VkvError
    ├── ContainerError      the safetensors framing is broken          (rules C*)
    │   └── NotVkvError     a safetensors file of another format       (C8)
    ├── HeaderError         the header is broken                       (rules H*)
    ├── DigestError         stored bytes do not match their digest     (rules D*)
    ├── CodecError          codec parameters or parts are broken       (rules K*, and the codec's)
    ├── UnsupportedError    a newer file than this build can read      (H3, H4)
    │   └── UnknownCodecError                                          (K1)
    ├── MissingFileError    a file that this one depends on is missing (H12)
    ├── MismatchError       the file belongs to another model          (rules I*)
    ├── CacheError          a live cache cannot be saved or rebuilt    (rules L*)
    └── StoreUnavailableError   a store's index is busy, or cannot be read or written now

A message says where, then what was found, then what was expected, then the
number of the rule in ``spec/v1``. Errors of the file system (a missing file, a
full disk) stay the ``OSError`` they are.
"""

from __future__ import annotations

from difflib import get_close_matches

__all__ = [
    "CacheError",
    "CodecError",
    "ContainerError",
    "DigestError",
    "HeaderError",
    "MismatchError",
    "MissingFileError",
    "NotVkvError",
    "StoreUnavailableError",
    "UnknownCodecError",
    "UnsupportedError",
    "VkvError",
]


#: Characters of a message, and of each part of a path: both quote what a file chose.
MAX_MESSAGE, MAX_AT = 4000, 300


def _short(text: str, limit: int = MAX_AT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


class VkvError(Exception):
    """Base of all vkv errors.

    Args:
        message: One sentence: what was found, then what was expected.
        rule: Id of the broken rule in ``spec/v1``, e.g. ``"C4"``.
        at: Dotted path to the offending value, e.g. ``"layers[3].keys"``.
    """

    def __init__(self, message: str, *, rule: str | None = None, at: str | None = None):
        super().__init__(message)
        self.message, self.rule, self.at = _short(message, MAX_MESSAGE), rule, at and _short(at)

    def __str__(self) -> str:
        where = f"{self.at}: " if self.at else ""
        tail = f" [{self.rule}]" if self.rule else ""
        return f"{where}{self.message}{tail}"

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild without ``__init__``, whose arguments differ from class to class."""
        return rebuilt, (type(self), self.args, self.__dict__)

    def within(self, at: str) -> VkvError:
        """Prefix the path with ``at`` and return the same error."""
        self.at = f"{_short(at)}.{self.at}" if self.at else _short(at)
        return self

    def of_file(self, name: str) -> VkvError:
        """Put the name of a file before the path and return the same error."""
        self.at = f"{_short(name)}: {self.at}" if self.at else _short(name)
        return self


def rebuilt(kind: type[VkvError], args: tuple[object, ...], state: dict[str, object]) -> VkvError:
    """Return an error as it was pickled."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ContainerError(VkvError):
    """The bytes are not a strict safetensors file."""


class NotVkvError(ContainerError):
    """The file is safetensors, but of another format."""


class HeaderError(VkvError):
    """The msgpack header is damaged, or does not fit the tensors beside it."""


class DigestError(VkvError):
    """Stored bytes are not the bytes that were written."""


class CodecError(VkvError):
    """A codec's parameters, parts or values are outside what its page allows."""


class UnsupportedError(VkvError):
    """The file is valid but needs a feature that this build does not have."""


class UnknownCodecError(UnsupportedError):
    """The codec id, or its version, is not in the registry."""

    def __init__(self, codec: str, version: int, *, known: dict[str, int], at: str | None = None):
        self.codec, self.version = codec, version
        if codec in known:
            found = f"codec {codec!r} version {version}; newest known is {known[codec]}"
        else:
            found = f"codec {codec!r}; known codecs are {', '.join(sorted(known))}"
            if near := get_close_matches(codec, known, n=1):
                found += f"; did you mean {near[0]!r}?"
        super().__init__(f"unsupported {found}", rule="K1", at=at)


class MissingFileError(VkvError):
    """A file that this one depends on was not found.

    Args:
        id: Id of the missing file, hex.
        search_paths: Files and folders that were searched.
        ended: What ended the search early, if anything did, e.g. ``"after 4,096 files"``.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        search_paths: list[str],
        *,
        ended: str = "",
        at: str | None = None,
    ):
        self.id, self.search_paths = id, search_paths
        where = ", ".join(search_paths) or "no search path"
        super().__init__(
            f"depends on file {id}, which is not in {where}"
            + f" (the search ended {ended})" * bool(ended)
            + "; pass search_paths= (--search-path) with its folder",
            rule="H12",
            at=at,
        )


class MismatchError(VkvError):
    """The file was made with another model or tokenizer.

    Args:
        differences: All differences, one sentence each.
    """

    def __init__(self, differences: list[str], *, at: str | None = None):
        self.differences = differences
        super().__init__("; ".join(differences), rule="I1", at=at)


class CacheError(VkvError):
    """A live cache object cannot be stored, or cannot be rebuilt from the file."""


class StoreUnavailableError(VkvError):
    """The index of a store cannot be used at the moment; nothing is wrong with it.

    Args:
        no_space: The disk is full.
    """

    def __init__(self, message: str, *, at: str | None = None, no_space: bool = False):
        self.no_space = no_space
        super().__init__(message, at=at)
