"""Read and write the msgpack header. Structure only: no codecs, no MLX.

Rules H1 to H11 of ``spec/v1/format.md``; what compares the header with the container
(the rest of H6, and H10) is in ``vkv.format.document``. A header is canonical msgpack (H1),
so equal headers are equal bytes and the file's id is a digest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vkv.errors import HeaderError, UnsupportedError
from vkv.format import canonical, model_config
from vkv.format.header_rules import check_references
from vkv.format.limits import ALIGN, MANY, MAX_DEPTH, MAX_HEADER, PAD_OVERHEAD
from vkv.format.schema import Header

MAJOR, MINOR = 1, 0
VERSION = f"{MAJOR}.{MINOR}"
#: Features a reader of this build understands (H4). Grows with minor versions.
KNOWN_NEEDS: frozenset[str] = frozenset({"checkpoints", "files", "rope"})

_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(Header)


def dump(header: Header) -> bytes:
    """Return the canonical bytes of ``header`` (H1): sorted keys, shortest forms, no defaults.

    ``pad`` is set here.

    Raises:
        HeaderError: A text is not Unicode (H1), or the result is over ``MAX_HEADER`` (H5).
    """
    try:
        raw = _ENCODER.encode(msgspec.structs.replace(header, pad=b""))
    except UnicodeEncodeError as exc:
        raise HeaderError(f"not Unicode: {exc}", rule="H1", at="header") from None
    if len(raw) % ALIGN:
        pad = bytes(-(len(raw) + PAD_OVERHEAD) % ALIGN or ALIGN)
        raw = _ENCODER.encode(msgspec.structs.replace(header, pad=pad))
    if len(raw) > MAX_HEADER:
        raise _too_long(header, len(raw))
    return raw


def _too_long(header: Header, nbytes: int) -> HeaderError:
    """Return the error of a header over the limit (H5), which names its longest field."""
    sizes = {name: len(_ENCODER.encode(getattr(header, name))) for name in Header.__struct_fields__}
    longest = max(sizes, key=sizes.__getitem__)
    found = f"{nbytes} bytes, the limit is {MAX_HEADER}; {sizes[longest]} of them are {longest}"
    return HeaderError(found, rule="H5", at=longest if longest == "metadata" else "header")


def load(raw: bytes) -> Header:
    """Parse and check a header; unknown fields are ignored.

    Raises:
        HeaderError: Not msgpack or not canonical (H1), a field of the wrong type
            or range (H2, H9), too large (H5, H13), inconsistent (H4, H6, H7, H11), too
            deep (H8).
        UnsupportedError: Another major version (H3) or an unknown need (H4).
    """
    if len(raw) > MAX_HEADER:
        raise HeaderError(f"{len(raw)} bytes, the limit is {MAX_HEADER}", rule="H5", at="header")
    header = _decoded(raw)
    _check_number(header)
    unknown = sorted(set(header.needs) - KNOWN_NEEDS)
    if unknown:
        raise UnsupportedError(
            f"the file needs {', '.join(map(repr, unknown))}; this build knows "
            f"{', '.join(sorted(KNOWN_NEEDS))}",
            rule="H4",
            at="needs",
        )
    if header.model is not None:
        model_config.parse(header.model.config)
    check_references(header)
    return header


def _decoded(raw: bytes) -> Header:
    """Decode a header and refuse bytes that are not canonical.

    Decoding by type comes first: it builds nothing that no field has. Bytes that equal what
    the encoder makes of the fields are canonical; others (unknown fields) are walked.
    """
    try:
        header = _DECODER.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        canonical.check(raw)
        _check_version(_version(raw))
        raise _mistyped(str(exc)) from None
    if _ENCODER.encode(header) != raw:
        canonical.check(raw)
    _check_version(header.version)
    if header.pad.strip(b"\0"):
        raise HeaderError("holds more than zeros", rule="H2", at="pad")
    return header


def _mistyped(message: str) -> HeaderError:
    """Turn a message of msgspec into an error with its path, e.g. ``layers[0].kind``."""
    found, _, path = message.partition(" - at `$.")
    at = path.rstrip("`") or "header"
    return HeaderError(found, rule="H9" if at.startswith("metadata") else "H2", at=at)


def _check_number(header: Header) -> None:
    """Check number and depth of layers (H8), before recursive code walks them."""
    level, layers, segments = list(header.layers), 0, 0
    level += [layer for c in header.checkpoints for layer in c.layers.values()]
    for _ in range(MAX_DEPTH + 1):
        layers += len(level)
        segments += sum(len(t.segments) for layer in level for t in layer.tensors.values())
        if max(layers, segments) > MANY:
            found = f"{layers} layers and {segments} segments, the limit is {MANY}"
            raise HeaderError(found, rule="H8", at="layers")
        level = [child for layer in level for child in layer.children]
    if level:
        raise HeaderError(f"nested deeper than {MAX_DEPTH} lists", rule="H8", at="layers")


class _Version(msgspec.Struct):
    version: str


def _version(raw: bytes) -> str:
    """Return the version of a header whose other fields this build may not know."""
    try:
        return msgspec.msgpack.decode(raw, type=_Version).version
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise HeaderError(f"no format version like '1.0': {exc}", rule="H2", at="version") from None


def _check_version(version: str) -> None:
    try:
        major, minor = (int(n) for n in version[:20].split(".") if n.isascii() and n.isdecimal())
    except ValueError as exc:
        raise HeaderError(f"no format version like '1.0': {exc}", rule="H2", at="version") from None
    if f"{major}.{minor}" != version:
        raise HeaderError(f"{version!r} is not of the form '1.0'", rule="H2", at="version")
    if major != MAJOR:
        raise UnsupportedError(
            f"format version {version}; this build reads {MAJOR}.x", rule="H3", at="version"
        )


def replace(head: Header, **changes: Any) -> Header:
    """Return a copy of ``head`` with some fields changed."""
    return msgspec.structs.replace(head, **changes)


def metadata(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Check user metadata: text to text, as ``mlx_lm.save_prompt_cache`` has it.

    Raises:
        HeaderError: A key or a value is not a string (H9), or they are too many.
    """
    if values is not None and not isinstance(values, Mapping):
        raise HeaderError(
            f"a {type(values).__name__}, expected a mapping of text to text",
            rule="H9",
            at="metadata",
        )
    if values is not None and len(values) > MANY:
        raise HeaderError(f"{len(values)} entries, the limit is {MANY}", rule="H9", at="metadata")
    for key, value in (values or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise HeaderError(f"{key!r}: {value!r} is not text to text", rule="H9", at="metadata")
    return dict(values or {})
