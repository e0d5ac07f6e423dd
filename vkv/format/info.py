"""Describe a file from its header: ``vkv.inspect``. Needs neither MLX nor the codecs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vkv.format.account import Accounting, account, checkpoint_bytes
from vkv.format.document import Document, open_document
from vkv.format.layer_summary import codec_string, layer_groups
from vkv.format.layers import external_references, segments
from vkv.format.notebook import facts, place
from vkv.format.overview import layer_kinds, tensor_kinds
from vkv.format.schema import Header

#: Version of the JSON that ``Info.to_dict`` returns.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, repr=False)
class Info:
    """Describe one file.

    Attributes:
        path: As it was given.
        id: BLAKE3 of the header, hex; it covers every byte through the digests.
        size: Bytes.
        header: All fields of the file's header.
        accounting: Bytes by purpose; they add up to ``size``.
    """

    path: str
    id: str
    size: int
    header: Header
    accounting: Accounting

    def __repr__(self) -> str:
        tokens = "no token ids" if self.tokens is None else f"{self.tokens} tokens"
        bits = f"{self.accounting.bits:.2f} bits per element"
        return (
            f"<vkv {place(self.path)!r}: {tokens}, {self.size:,} bytes, {bits}, id {self.id[:12]}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        head, account = self.header, self.accounting
        kinds = [(kind.name, str(kind)) for kind in tensor_kinds(head)]
        return facts(
            place(self.path),
            [
                ("id", self.id),
                ("size", f"{self.size:,} bytes"),
                ("rate", f"{account.bits:.2f} bits per element" if account.elements else ""),
                ("model", "not recorded" if head.model is None else head.model.type),
                ("tokens", "not recorded" if self.tokens is None else f"{self.tokens:,}"),
                ("layers", layer_kinds(head)),
                *kinds,
                *(
                    (role, f"{n:,} bytes, {n / self.size:.1%}")
                    for role, n in account.roles.items()
                    if n
                ),
                ("depends on", ", ".join(self.dependencies)),
            ],
        )

    @property
    def tokens(self) -> int | None:
        """Number of tokens the cache covers; ``None`` if not recorded."""
        return self.header.tokens.count if self.header.tokens else None

    @property
    def metadata(self) -> dict[str, str]:
        return self.header.metadata

    @property
    def codecs(self) -> dict[str, str]:
        """Return the codec strings of ``keys`` and ``values``, as ``vkv.save`` takes them.

        Of several codecs it is the one that holds most tokens, and ``raw`` only where there
        is no other.
        """
        counts: dict[str, dict[str, int]] = {"keys": {}, "values": {}}
        for _, name, tensor, segment in segments(self.header):
            if name in counts and not segment.is_raw:
                count = segment.tokens or (tensor.shape[-2] if len(tensor.shape) == 4 else 0)
                text = codec_string(segment)
                counts[name][text] = counts[name].get(text, 0) + count
        return {
            name: max(by_codec, key=by_codec.__getitem__, default="raw")
            for name, by_codec in counts.items()
        }

    @property
    def dependencies(self) -> dict[str, int]:
        """Files that this one depends on: id -> number of tensors taken from it."""
        return {key: len(names) for key, names in external_references(self.header).items()}

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Return tokens and bytes of each checkpoint, and whether it ends a message."""
        sizes = checkpoint_bytes(self.header)
        return [
            {"tokens": c.tokens, "message": c.message, "bytes": size}
            for c, size in zip(self.header.checkpoints, sizes, strict=True)
        ]

    @property
    def notes(self) -> list[str]:
        """Return one line for each group of layers whose codec is not the one asked for."""
        return [
            f"{group.layers} {tensor}: {note}"
            for group in layer_groups(self.header.layers)
            for tensor, note in group.notes.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with a ``schema_version``."""
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
            "dependencies": self.dependencies,
            "checkpoints": self.checkpoints,
            "layers": [group.to_dict() for group in layer_groups(head.layers)],
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
                "external": total.external,
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
