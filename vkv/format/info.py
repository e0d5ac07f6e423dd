"""What a file says about itself: ``vkv.inspect``. Needs neither MLX nor the codecs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vkv.format.account import Accounting, account
from vkv.format.document import Document, open_document
from vkv.format.layers import external_references, segments
from vkv.format.schema import Header, Layer, Segment, Tensor

#: Version of the JSON that ``Info.to_dict`` gives.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, repr=False)
class Info:
    """One file, described.

    Attributes:
        path: As it was given.
        id: BLAKE3 of the header, hex; it covers every byte through the digests.
        size: Bytes.
        header: All fields of the file's header.
        accounting: What every byte is spent on.
    """

    path: str
    id: str
    size: int
    header: Header
    accounting: Accounting

    def __repr__(self) -> str:
        tokens = "no token ids" if self.tokens is None else f"{self.tokens} tokens"
        bits = f"{self.accounting.bits:.2f} bits per element"
        return f"<vkv {self.path!r}: {tokens}, {self.size:,} bytes, {bits}, id {self.id[:12]}>"

    @property
    def tokens(self) -> int | None:
        """Tokens the cache covers, if the file says."""
        return self.header.tokens.count if self.header.tokens else None

    @property
    def metadata(self) -> dict[str, str]:
        return self.header.metadata

    @property
    def codecs(self) -> dict[str, str]:
        """Codec strings of ``keys`` and ``values``, as ``vkv.save`` takes them.

        Of several the one that holds most tokens; ``raw`` only where there is no other.
        """
        tokens: dict[str, dict[str, int]] = {"keys": {}, "values": {}}
        for _, name, tensor, segment in segments(self.header):
            if name in tokens and not segment.is_raw:
                count = segment.tokens or (tensor.shape[-2] if len(tensor.shape) == 4 else 0)
                text = codec_string(segment)
                tokens[name][text] = tokens[name].get(text, 0) + count
        return {
            name: max(found, key=found.__getitem__, default="raw") for name, found in tokens.items()
        }

    @property
    def files(self) -> dict[str, int]:
        """Other files that this one stands on: id -> tensors used of it."""
        return {key.hex(): len(names) for key, names in external_references(self.header).items()}

    @property
    def notes(self) -> list[str]:
        """What was asked for and not done, one line per group of layers."""
        return [
            f"{row.layers} {tensor}: {note}"
            for row in rows(self.header.layers)
            for tensor, note in row.notes.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with a ``schema_version``."""
        head, total = self.header, self.accounting
        return {
            "schema_version": SCHEMA_VERSION,
            "path": self.path,
            "id": self.id,
            "size": self.size,
            "format_version": head.version,
            "producer": head.producer,
            "created": head.created,
            "needs": list(head.needs),
            "model": _model(head),
            "tokenizer": _tokenizer(head),
            "tokens": self.tokens,
            "tokens_digest": head.tokens.digest.hex() if head.tokens else None,
            "metadata": head.metadata,
            "files": self.files,
            "layers": [row.to_dict() for row in rows(head.layers)],
            "accounting": {
                "roles": total.roles,
                "groups": {
                    name: {
                        "elements": g.elements,
                        "bytes": g.bytes,
                        "bits": g.bits,
                        "roles": g.roles,
                    }
                    for name, g in total.groups.items()
                },
                "shared": total.shared,
                "elements": total.elements,
                "elsewhere": total.elsewhere,
                "bits": total.bits,
                "ratio_to_fp16": total.ratio,
                "adds_up": total.adds_up,
            },
        }


def _model(head: Header) -> dict[str, Any] | None:
    if head.model is None:
        return None
    return {
        "id": head.model.id.hex(),
        "type": head.model.type,
        "layers": len(head.model.layers),
        "parameters": head.model.parameters,
    }


def _tokenizer(head: Header) -> dict[str, Any] | None:
    if head.tokenizer is None:
        return None
    template = head.tokenizer.template
    return {
        "id": head.tokenizer.id.hex(),
        "vocab_size": head.tokenizer.vocab_size,
        "template": template.hex() if template else None,
    }


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive layers that look alike."""

    layers: str
    kind: str
    scalars: dict[str, int]
    tensors: dict[str, str]
    notes: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "kind": self.kind,
            "scalars": self.scalars,
            "tensors": self.tensors,
            "notes": self.notes,
        }


def rows(layers: tuple[Layer, ...], prefix: str = "") -> list[Row]:
    """One row per run of equal layers; children of a list follow their parent."""
    found: list[Row] = []
    first = 0
    for i, layer in enumerate(layers):
        if i + 1 < len(layers) and _look(layers[i + 1]) == _look(layer):
            continue
        name = f"{prefix}{first}" if first == i else f"{prefix}{first}-{i}"
        found.append(_row(name, layer))
        found += rows(layer.children, f"{name}.")
        first = i + 1
    return found


def _row(name: str, layer: Layer) -> Row:
    tensors = {n: describe(t) for n, t in sorted(layer.tensors.items())}
    notes = {n: t.note for n, t in sorted(layer.tensors.items()) if t.note}
    return Row(name, layer.kind, layer.scalars, tensors, notes)


def _look(layer: Layer) -> tuple[Any, ...]:
    row = _row("", layer)
    return row, tuple(_look(child) for child in layer.children)


def describe(tensor: Tensor) -> str:
    """``BF16 (1, 8, 4096, 128): raw 4 + affine:bits=4,group=64,scale=BF16 4092 in 3``."""
    shape = ", ".join(map(str, tensor.shape))
    runs = [(codec, list(run)) for codec, run in groupby(tensor.segments, key=codec_string)]
    pieces = []
    for codec, run in runs:
        count = f" {sum(s.tokens or 0 for s in run)}" if len(runs) > 1 else ""
        pieces.append(f"{codec}{count}" + (f" in {len(run)} segments" if len(run) > 1 else ""))
    return f"{tensor.dtype} ({shape}): {' + '.join(pieces)}"


def codec_string(segment: Segment) -> str:
    """``affine:bits=4,group=64,scale=F16``; plain ``raw``, whose one param is the tensor's."""
    if segment.is_raw or not segment.params:
        return segment.codec
    return f"{segment.codec}:" + ",".join(f"{k}={v}" for k, v in sorted(segment.params.items()))


def of_document(document: Document) -> Info:
    """Describe an open document."""
    return Info(document.name, document.id, document.size, document.header, account(document))


def inspect(target: str | os.PathLike[str]) -> Info:
    """Describe a file, reading only its first bytes.

    Args:
        target: A path, or a URL of any kind that fsspec knows (``https``, ``s3``, ``hf`` …).

    Raises:
        VkvError: The file is damaged, or newer than this build.
        OSError: It cannot be opened.
    """
    with open_document(target) as document:
        return of_document(document)
