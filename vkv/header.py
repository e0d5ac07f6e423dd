"""The msgpack header: what the stored tensors mean. Structure only: no codecs, no MLX.

Rules H1 to H11 of ``spec/v1/format.md``; what compares the header with the container
(the rest of H6, and H10) is in ``vkv.document``. A header is canonical msgpack (H1),
so equal headers are equal bytes and the file's id is a digest of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any

import msgspec

from vkv import canonical
from vkv.errors import HeaderError, UnsupportedError

MAJOR, MINOR = 1, 0
VERSION = f"{MAJOR}.{MINOR}"
#: Features a reader of this build understands (H4). Grows with minor versions.
KNOWN_NEEDS: frozenset[str] = frozenset({"files", "rope"})

#: 6,000 stored tensors fit. Decoded, the smallest things of which a field may have any number
#: (frequencies) take 49 times their bytes.
MAX_HEADER = 1 << 20
ALIGN = 64
#: Key ``pad`` and the head of its bytes.
PAD_OVERHEAD = 6
#: CacheList inside CacheList; the deepest model known nests once.
MAX_DEPTH = 4
#: Entries of a list or map that models make longer: layers, segments and what there is one of for
#: each; entries of the others; and frequencies of a rope.
MANY, FEW, MAX_FREQS = 4096, 64, 1 << 15
#: More than any model takes; as a list they are nine times their bytes.
MAX_TOKENS = 1 << 22
#: What a rope's numbers are between. The largest base known is 1e11.
ROPE_RANGE = (1e-12, 1e12)
#: Other files that one may stand on; each is held open while it is read.
MAX_FILES = 64

ITEMSIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

#: What a stored tensor's bytes are spent on; the rows of the byte account.
ROLES = ("payload", "table", "metadata", "outlier", "sink", "residual", "tokens")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48) - 1)]
#: MLX counts sizes in 32 bits.
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
Scalar = int | float | str | bool
Many = msgspec.Meta(max_length=MANY)
Few = msgspec.Meta(max_length=FEW)


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored tensor: its role in the account, form and BLAKE3.

    ``file`` is the id of another vkv file that holds it; without, it is in the container.
    """

    role: Name
    dtype: Name
    shape: Shape
    digest: Digest
    file: Digest | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


class Rope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rotary embedding as ``mx.fast.rope`` takes it.

    Either ``base`` or ``freqs`` (float32 values, ``dims / 2`` of them, as MLX's
    ``freqs`` argument) is given. ``mscale`` multiplies the rotated dims first
    (YaRN, SuScaled).
    """

    dims: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    traditional: bool = False
    base: float | None = None
    freqs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_FREQS)] | None = None
    scale: float = 1.0
    mscale: float = 1.0


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of tokens written by one codec.

    ``params`` belongs to the codec, not to the header. ``parts`` maps the
    codec's part names to names of stored tensors; several segments may share one
    (a codebook). ``rope`` is an index into ``Header.ropes`` when the keys were
    rotated back before they were encoded.
    """

    codec: Name
    version: Annotated[int, msgspec.Meta(ge=1)]
    params: Annotated[dict[str, Scalar], Few] = {}
    tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    parts: Annotated[dict[Name, Name], Few]
    rope: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Tensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One logical tensor of a layer: its segments in order, joined along axis -2.

    ``note`` says why a codec that was asked for was not used.
    """

    dtype: Name
    shape: Shape
    segments: Annotated[tuple[Segment, ...], Many]
    note: str | None = None


class Layer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live cache: its kind, its scalars, its tensors or its children."""

    kind: Name
    scalars: Annotated[dict[str, int], Few] = {}
    tensors: dict[Name, Tensor] = {}
    children: Annotated[tuple[Layer, ...], Many] = ()


class Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity of the model (``vkv.identity``). ``ropes`` holds, per cache, an index or nil."""

    id: Digest
    type: str
    config: str
    parameters: Count
    layers: Annotated[tuple[Digest, ...], Many]
    rest: Digest
    ropes: Annotated[tuple[int | None, ...], Many] = ()


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity of the tokenizer; the chat template stands apart."""

    id: Digest
    vocab_size: Count
    template: Digest | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The token ids: how many, and BLAKE3 of their little-endian u32 bytes."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    digest: Digest
    tensor: Name


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a ``.vkv`` file says about itself.

    ``tables`` offers stored tables to other files: a name such as
    ``layers.3.keys.basis`` to the name of a stored tensor. A file with tables and no
    layers holds no cache.

    ``pad`` is zeros that bring the header to a multiple of 64 bytes, so that the
    first tensor after it is aligned.
    """

    version: str
    producer: str
    needs: Annotated[tuple[str, ...], Few] = ()
    created: str | None = None
    model: Model | None = None
    tokenizer: Tokenizer | None = None
    tokens: Tokens | None = None
    ropes: Annotated[tuple[Rope, ...], Many] = ()
    layers: Annotated[tuple[Layer, ...], Many]
    tensors: dict[Name, Stored]
    tables: Annotated[dict[Name, Name], Many] = {}
    metadata: Annotated[dict[str, str], Many] = {}
    pad: bytes = b""


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(Header)


def dump(header: Header) -> bytes:
    """Canonical bytes of ``header`` (H1): sorted keys, shortest forms, no defaults.

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
        raise HeaderError(f"{len(raw)} bytes, the limit is {MAX_HEADER}", rule="H5", at="header")
    return raw


def load(raw: bytes) -> Header:
    """Parse and check a header; unknown fields are ignored.

    Raises:
        HeaderError: Not msgpack or not canonical (H1), a field of the wrong type
            or range (H2, H9), too large (H5), inconsistent (H4, H6, H7), too deep (H8).
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
    _check_references(header)
    return header


def _decoded(raw: bytes) -> Header:
    """The fields of canonical bytes.

    Decoded by type first, which builds nothing that no field has. What an encoder makes of
    the fields is canonical; other bytes are looked at one by one.
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
    """msgspec's words, its path ``$.layers[0].kind`` as ours."""
    found, _, path = message.partition(" - at `$.")
    at = path.rstrip("`") or "header"
    return HeaderError(found, rule="H9" if at.startswith("metadata") else "H2", at=at)


def _check_number(header: Header) -> None:
    """Before anything walks the layers, which takes a frame of the stack a level."""
    level, layers, segments = list(header.layers), 0, 0
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
    """The version of a header whose other fields may be those of another major."""
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
    """A copy of ``head`` with some fields changed."""
    return msgspec.structs.replace(head, **changes)


def walk(layers: tuple[Layer, ...], at: str = "layers") -> list[tuple[str, Layer]]:
    """Every layer and child with its path (``layers[3]``, ``layers[3].children[0]``), in order."""
    found: list[tuple[str, Layer]] = []
    for i, layer in enumerate(layers):
        path = f"{at}[{i}]"
        found.append((path, layer))
        found += walk(layer.children, f"{path}.children")
    return found


def segments(header: Header) -> list[tuple[str, str, Tensor, Segment]]:
    """Every segment as ``(path, tensor name, tensor, segment)``, in file order."""
    return [
        (f"{path}.{name}.segments[{i}]", name, tensor, segment)
        for path, layer in walk(header.layers)
        for name, tensor in sorted(layer.tensors.items())
        for i, segment in enumerate(tensor.segments)
    ]


def segment_shape(tensor: Tensor, segment: Segment) -> tuple[int, ...]:
    """Shape of the part of ``tensor`` that ``segment`` covers."""
    if segment.tokens is None:
        return tensor.shape
    return (*tensor.shape[:-2], segment.tokens, tensor.shape[-1])


def _check_references(header: Header) -> None:
    uses: Counter[str] = Counter()
    _check_files(header)
    for name, stored in header.tensors.items():
        if stored.dtype not in ITEMSIZE:
            raise HeaderError(f"unknown dtype {stored.dtype!r}", rule="H2", at=f"tensors.{name}")
        if stored.role not in ROLES:
            raise HeaderError(f"unknown role {stored.role!r}", rule="H2", at=f"tensors.{name}")
    for path, _, tensor, segment in segments(header):
        uses.update(_check_segment(header, path, tensor, segment))
    for path, layer in walk(header.layers):
        _check_layer(path, layer)
    uses.update(_check_tables(header))
    if header.tokens is not None:
        uses[_check_tokens(header.tokens, header.tensors)] += 1
    if header.model is not None:
        for index in header.model.ropes:
            _check_rope(index, header, "model.ropes")
        if header.layers and len(header.model.ropes) not in (0, len(header.layers)):
            found = f"{len(header.model.ropes)} entries for {len(header.layers)} layers"
            raise HeaderError(found, rule="H6", at="model.ropes")
    for name, stored in header.tensors.items():
        if uses[name] == 0 or (uses[name] > 1 and stored.role != "table"):
            raise HeaderError(
                f"{uses[name]} uses of a {stored.role}, expected one (of a table: one or more)",
                rule="H6",
                at=f"tensors.{name}",
            )


def _check_tables(header: Header) -> list[str]:
    for name, tensor in header.tables.items():
        stored = header.tensors.get(tensor)
        if stored is None or stored.role != "table":
            found = "not in tensors" if stored is None else f"a {stored.role}"
            raise HeaderError(
                f"{tensor!r} is {found}, expected a table", rule="H6", at=f"tables.{name}"
            )
    return list(header.tables.values())


def files(header: Header) -> dict[bytes, list[str]]:
    """Other files that ``header`` stands on: id -> names of the tensors there."""
    found: dict[bytes, list[str]] = {}
    for name, stored in header.tensors.items():
        if stored.file is not None:
            found.setdefault(stored.file, []).append(name)
    return found


def _check_files(header: Header) -> None:
    found = files(header)
    if found and "files" not in header.needs:
        raise HeaderError("tensors of other files, but needs does not list 'files'", rule="H11")
    if len(found) > MAX_FILES:
        raise HeaderError(f"stands on {len(found)} files, the limit is {MAX_FILES}", rule="H11")
    if header.tokens is not None:
        stored = header.tensors.get(header.tokens.tensor)
        if stored is not None and stored.file is not None:
            raise HeaderError("the token ids stand in another file", rule="H11", at="tokens")


def _check_segment(header: Header, path: str, tensor: Tensor, segment: Segment) -> list[str]:
    for part, name in segment.parts.items():
        if name not in header.tensors:
            raise HeaderError(
                f"part {part!r} is {name!r}, which is not in tensors", rule="H6", at=path
            )
    if segment.tokens is not None and len(tensor.shape) < 2:
        raise HeaderError(f"counts tokens in a tensor of shape {tensor.shape}", rule="H7", at=path)
    _check_rope(segment.rope, header, path)
    if segment.rope is not None:
        try:
            check_rope(header.ropes[segment.rope], tensor.shape[-1] if tensor.shape else 0)
        except HeaderError as exc:
            raise exc.within(path) from None
    if segment.rope is not None and "rope" not in header.needs:
        raise HeaderError("rotated keys, but needs does not list 'rope'", rule="H4", at=path)
    return list(segment.parts.values())


def _check_layer(path: str, layer: Layer) -> None:
    for name, tensor in layer.tensors.items():
        at = f"{path}.{name}"
        if tensor.dtype not in ITEMSIZE:
            raise HeaderError(f"unknown dtype {tensor.dtype!r}", rule="H2", at=at)
        counts = [s.tokens for s in tensor.segments]
        if counts == [None]:
            continue
        total = sum(n for n in counts if n is not None)
        if not counts or None in counts or not tensor.shape[1:] or total != tensor.shape[-2]:
            raise HeaderError(
                f"{len(counts)} segments cover {total} rows of a tensor of shape {tensor.shape}",
                rule="H7",
                at=at,
            )


def _check_tokens(tokens: Tokens, tensors: dict[str, Stored]) -> str:
    stored = tensors.get(tokens.tensor)
    form = stored and (stored.role, stored.dtype, stored.shape)
    if stored is None or form != ("tokens", "U32", (tokens.count,)):
        raise HeaderError(
            f"{tokens.tensor!r} is {form}, expected tokens, U32, {tokens.count} of them",
            rule="H6",
            at="tokens",
        )
    if stored.digest != tokens.digest:
        raise HeaderError("its digest is not that of its tensor", rule="H6", at="tokens")
    return tokens.tensor


def check_rope(rope: Rope, dim: int) -> None:
    """Refuse a rope that ``mx.fast.rope`` cannot apply to ``dim`` channels.

    Numbers are such that no angle of any position leaves float32. A frequency may be
    infinite: it turns nothing.

    Raises:
        HeaderError: Says what was found (H2).
    """
    factors = [rope.scale, rope.mscale, 1.0 if rope.base is None else rope.base]
    low, high = ROPE_RANGE
    if rope.dims % 2 or not 0 < rope.dims <= dim:
        found = f"{rope.dims} dims, expected an even number up to {dim}"
    elif (rope.base is None) == (rope.freqs is None):
        found = "base and freqs both or neither, expected one of them"
    elif rope.freqs is not None and len(rope.freqs) != rope.dims // 2:
        found = f"{len(rope.freqs)} freqs, expected {rope.dims // 2}"
    elif not all(low <= n <= high for n in factors):
        found = f"scale, mscale, base {factors}, expected numbers from {low} to {high}"
    elif not all(low <= n <= high or n == math.inf for n in rope.freqs or ()):
        found = f"odd freqs, expected numbers from {low} to {high}, or infinite ones"
    else:
        return
    raise HeaderError(found, rule="H2", at="rope")


def _check_rope(index: int | None, header: Header, at: str) -> None:
    if index is not None and not 0 <= index < len(header.ropes):
        raise HeaderError(f"rope {index} of {len(header.ropes)}", rule="H6", at=at)


def metadata(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Check user metadata: text to text, as ``mlx_lm.save_prompt_cache`` has it.

    Raises:
        HeaderError: A key or a value is not a string (H9), or they are too many.
    """
    if values is not None and len(values) > MANY:
        raise HeaderError(f"{len(values)} entries, the limit is {MANY}", rule="H9", at="metadata")
    for key, value in (values or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise HeaderError(f"{key!r}: {value!r} is not text to text", rule="H9", at="metadata")
    return dict(values or {})
