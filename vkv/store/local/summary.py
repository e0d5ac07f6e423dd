"""Summarize a file for the index, from its header. Needs neither MLX nor the codecs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vkv.errors import CacheError, DigestError, VkvError
from vkv.format import container_write, header
from vkv.format.document import Document
from vkv.format.header import KNOWN_NEEDS, MAJOR
from vkv.format.info import of_document
from vkv.format.kinds import shortest
from vkv.format.layer_rules import check_cache, check_layers
from vkv.format.layers import external_references, leaf_layers, segments
from vkv.format.schema import Header, Layer, Model
from vkv.sources.local import FileSource
from vkv.store.local.prefix_tree import WIDTH
from vkv.tools.inline import whole


@dataclass(frozen=True, slots=True)
class Description:
    """Hold the columns of an entry that follow from its file, and its tokens.

    Attributes:
        key: Its id.
        size: Bytes of the file.
        model: Id of the model.
        label: A name of that model for people.
        codec: Codec of keys and values, or of each.
        name: Metadata ``name``.
        tags: Metadata ``tags``, split at commas.
        needs: All that a reader of the file must know.
        trims: Whether its caches can drop their last tokens.
        checkpoints: Token counts that they can go back to otherwise, ascending.
        tokens: Token ids, little-endian u32.
        digest: BLAKE3 of them.
        tokens_at: Their offset in the file, in bytes.
        dependencies: Ids of the files that this one depends on.
        content: The id that the file would have if it depended on none: of two files
            with the same content, one is enough.
    """

    key: str
    size: int
    model: bytes
    label: str
    codec: str
    name: str
    tags: tuple[str, ...]
    needs: str
    trims: bool
    tokens: bytes
    digest: bytes
    tokens_at: int
    dependencies: tuple[str, ...]
    content: bytes
    checkpoints: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.tokens) // WIDTH

    def covers(self, shared: int) -> int:
        """Return how many tokens of a prompt it serves that shares so many leading ones."""
        if self.trims or shared == self.count:
            return shared
        return max((n for n in self.checkpoints if n <= shared), default=0)


def is_entry(document: Document) -> bool:
    """Return whether a prompt can be matched to a file; others can only be depended on."""
    return document.header.model is not None and document.header.tokens is not None


def describe(document: Document) -> Description:
    """Summarize an open file, after checking all rules on its header.

    Raises:
        VkvError: It breaks a rule, or is of no use to a store: it names no model or
            holds no tokens.
    """
    from vkv.identity.heads import check_heads  # brings NumPy

    head = document.header
    if head.model is None or head.tokens is None:
        lacking = "names no model" if head.model is None else "holds no token ids"
        raise CacheError(f"the file {lacking}, so no prompt can be matched", at=document.name)
    for check in (check_cache, check_layers, check_heads):
        check(head)
    info = of_document(document)
    names = info.codecs
    same = names["keys"] == names["values"]
    return Description(
        key=document.id,
        size=document.size,
        model=head.model.id,
        label=label_of(head.metadata.get("model", ""), head.model),
        codec=names["keys"] if same else f"keys {names['keys']}, values {names['values']}",
        name=head.metadata.get("name", ""),
        tags=tags_of(head.metadata.get("tags", "")),
        needs=needs_of(head),
        trims=trims(head.layers),
        digest=head.tokens.digest,
        tokens=document.read(head.tokens.tensor),
        tokens_at=document.entries[head.tokens.tensor].start,
        dependencies=tuple(external_references(head)),
        content=container_write.digest(header.dump(whole(head))),
        checkpoints=usable_checkpoints(head),
    )


def with_names(
    metadata: Mapping[str, str] | None, name: str | None, tags: Iterable[str]
) -> dict[str, str]:
    """Return metadata with a name and tags for people, where they are given.

    Raises:
        VkvError: A tag holds a comma.
    """
    found, words = dict(metadata or {}), list(tags)
    if wrong := [tag for tag in words if "," in tag or not tag.strip()]:
        raise VkvError(f"tag {wrong[0]!r}, expected a word without commas")
    if name is not None:
        found["name"] = name
    if words:
        found["tags"] = ",".join(tags_of(",".join(words)))
    return found


def tags_of(text: str) -> tuple[str, ...]:
    """Split ``"a, b"`` into tags: sorted, each once, none empty."""
    return tuple(sorted({tag.strip() for tag in text.split(",")} - {""}))


def label_of(name: str, model: Model) -> str:
    """Return a model's name for people: its last part, else its type and the start of its id."""
    last = name.rstrip("/").rpartition("/")[2]
    return last or f"{model.type} {model.id.hex()[:8]}"


def needs_of(head: Header) -> str:
    """Return all that a reader of the file must know, like ``+rope affine@1 raw@1 vkv@1``."""
    codecs = {f"{s.codec}@{s.version}" for _, _, _, s in segments(head)}
    features = {f"+{name}" for name in head.needs}
    return " ".join(sorted({f"vkv@{head.version.partition('.')[0]}", *codecs, *features}))


def known_needs() -> set[str]:
    """Return all that this build knows, in the same words. Imports MLX."""
    from vkv.codecs.registry import CODECS

    codecs = {f"{name}@{version}" for name, version in CODECS}
    return {f"vkv@{MAJOR}", *codecs, *(f"+{name}" for name in KNOWN_NEEDS)}


def trims(layers: tuple[Layer, ...]) -> bool:
    """Return whether caches made from ``layers`` can be cut to any prefix (L8)."""
    return shortest(layers) == 0


def usable_checkpoints(head: Header) -> tuple[int, ...]:
    """Return the checkpoints at which every layer is, or can be cut to, ascending.

    None where all layers can be cut to any prefix: there they are of no use.
    """
    if trims(head.layers):
        return ()
    return tuple(
        checkpoint.tokens
        for checkpoint in head.checkpoints
        if all(
            path in checkpoint.layers or _can_be_cut(layer, checkpoint.tokens)
            for path, layer in leaf_layers(head.layers)
        )
    )


def _can_be_cut(layer: Layer, tokens: int) -> bool:
    least = shortest((layer,))
    return least is not None and least <= tokens


def read_tokens(path: Path, start: int, count: int, digest: bytes) -> bytes:
    """Return the token bytes of a file whose description is known.

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
