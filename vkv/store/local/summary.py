"""What the index says of a file, taken from its header. Needs neither MLX nor the codecs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vkv.errors import CacheError, DigestError
from vkv.format import container_write, header
from vkv.format.document import Document, open_document
from vkv.format.header import KNOWN_NEEDS, MAJOR
from vkv.format.info import of_document
from vkv.format.kinds import shortest
from vkv.format.layers import external_references, segments
from vkv.format.schema import Header, Layer, Model
from vkv.sources.local import FileSource
from vkv.store.local.prefix_tree import WIDTH
from vkv.tools.inline import whole


@dataclass(frozen=True, slots=True)
class Description:
    """The columns of an entry that follow from its file, and its tokens.

    ``bases`` are the ids of the files it stands on. ``content`` is the id that the file
    would have if it held all it refers to: of two with the same, one is enough.
    """

    key: str
    size: int
    model: bytes
    label: str
    codec: str
    needs: str
    trims: bool
    tokens: bytes
    digest: bytes
    tokens_at: int
    bases: tuple[str, ...]
    content: bytes

    @property
    def count(self) -> int:
        return len(self.tokens) // WIDTH


def is_entry(document: Document) -> bool:
    """Whether a prompt can be matched to a file; others only serve to stand on."""
    return document.header.model is not None and document.header.tokens is not None


def describe(path: Path) -> Description:
    """Describe a file.

    Raises:
        VkvError: It is damaged, newer than this build, or of no use to a store:
            it names no model or holds no tokens.
        OSError: It cannot be opened.
    """
    with open_document(path) as document:
        return of(document)


def of(document: Document) -> Description:
    """Describe an open document; raises as ``describe``."""
    head = document.header
    if head.model is None or head.tokens is None:
        lacking = "names no model" if head.model is None else "holds no token ids"
        raise CacheError(f"the file {lacking}, so no prompt can be matched", at=document.name)
    info = of_document(document)
    names = info.codecs
    same = names["keys"] == names["values"]
    return Description(
        key=document.id,
        size=document.size,
        model=head.model.id,
        label=label_of(head.metadata.get("model", ""), head.model),
        codec=names["keys"] if same else f"keys {names['keys']}, values {names['values']}",
        needs=needs_of(head),
        trims=trims(head.layers),
        digest=head.tokens.digest,
        tokens=document.read(head.tokens.tensor),
        tokens_at=document.entries[head.tokens.tensor].start,
        bases=tuple(external_references(head)),
        content=container_write.digest(header.dump(whole(head))),
    )


def label_of(name: str, model: Model) -> str:
    """A model's name for people: the last part of it, else its type and the start of its id."""
    last = name.rstrip("/").rpartition("/")[2]
    return last or f"{model.type} {model.id.hex()[:8]}"


def needs_of(head: Header) -> str:
    """``+rope affine@1 raw@1 vkv@1``: all that a reader of the file must know."""
    codecs = {f"{s.codec}@{s.version}" for _, _, _, s in segments(head)}
    features = {f"+{name}" for name in head.needs}
    return " ".join(sorted({f"vkv@{head.version.partition('.')[0]}", *codecs, *features}))


def known_needs() -> set[str]:
    """All that this build knows, in the same words. Brings MLX."""
    from vkv.codecs.registry import CODECS

    codecs = {f"{name}@{version}" for name, version in CODECS}
    return {f"vkv@{MAJOR}", *codecs, *(f"+{name}" for name in KNOWN_NEEDS)}


def trims(layers: tuple[Layer, ...]) -> bool:
    """Return whether caches made from ``layers`` can be cut to any prefix (L8)."""
    return shortest(layers) == 0


def read_tokens(path: Path, start: int, count: int, digest: bytes) -> bytes:
    """The token bytes of a file whose description is known.

    Raises:
        DigestError: They are not those that were described.
        VkvError, OSError: They cannot be read.
    """
    source = FileSource(path)
    try:
        if not 0 <= start <= start + count * WIDTH <= source.size:
            raise DigestError(
                f"{count} tokens at {start}, the file has {source.size} bytes",
                rule="D1",
                at=str(path),
            )
        data = source.read(start, count * WIDTH)
    finally:
        source.close()
    if blake3(data).digest() != digest:
        raise DigestError("the token ids changed", rule="D1", at=str(path))
    return data
