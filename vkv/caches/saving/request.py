"""State what was asked of a save: the codecs, and all that decides how tensors are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vkv.caches.provenance import OpenFiles
from vkv.caches.saving.basis_file import AttachedBasis
from vkv.caches.saving.delta import ParentFile
from vkv.codecs import registry
from vkv.codecs.registry import CodecRequest
from vkv.errors import CodecError, VkvError
from vkv.format.schema import Rope, Stored

#: A codec string, or one for keys and one for values.
CodecSpec = str | Mapping[str, str]
#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
#: A tensor of more carried-over segments is joined where its codec can: each costs
#: header bytes, and a long conversation is saved many times.
MAX_SEGMENTS = 16
#: Segments of a whole file, at up to nine parts of about 170 bytes, that its header holds.
ALL_SEGMENTS = 640


@dataclass(frozen=True, slots=True)
class CodecPair:
    """The codecs that were asked for, one for keys and one for values."""

    keys: CodecRequest
    values: CodecRequest

    def both(self) -> tuple[CodecRequest, CodecRequest]:
        """Return both, keys first."""
        return self.keys, self.values

    def of(self, name: str) -> CodecRequest:
        """Return the one for tensor ``name``; what is no ``"values"`` goes with the keys."""
        return self.values if name == "values" else self.keys


def codec_pair(codec: CodecSpec) -> CodecPair:
    """Parse a codec string, or a mapping of one for keys and one for values.

    Raises:
        CodecError, UnknownCodecError: A codec string is refused.
    """
    if isinstance(codec, str):
        choice = registry.parse(codec)
        return CodecPair(choice, choice)
    if not isinstance(codec, Mapping) or not all(isinstance(v, str) for v in codec.values()):
        raise CodecError(
            f"{codec!r}, expected a codec string, or a map with one for 'keys' and 'values'",
            rule="K2",
            at="codec",
        )
    if unknown := sorted(codec.keys() - {"keys", "values"}):
        raise VkvError(f"{unknown[0]!r} is not one of 'keys', 'values'", rule="K2", at="codec")
    keys, values = (registry.parse(codec.get(name, "raw")) for name in ("keys", "values"))
    return CodecPair(keys, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """All that decides how tensors are stored; nothing in it changes during a save.

    Attributes:
        codecs: The codecs asked for.
        ropes: Rotary embeddings of the model.
        layer_ropes: For each layer, an index into ``ropes``, or ``None``.
        max_segments: Carried-over segments a tensor may have before they are joined.
        parent: The file whose segments are referred to where they can be.
        basis: The file whose tables are used where the codec takes one.
        sources: The files that the caches were loaded from, where codes are kept.
        force: Save also at a rate that leaves too little for the values.
        known_tables: Tables that other files hold; equal ones are referred to.
    """

    codecs: CodecPair
    ropes: tuple[Rope, ...] = ()
    layer_ropes: tuple[int | None, ...] = ()
    max_segments: int = MAX_SEGMENTS
    parent: ParentFile | None = None
    basis: AttachedBasis | None = None
    sources: OpenFiles = field(default_factory=dict)
    force: bool = False
    known_tables: tuple[Stored, ...] = ()

    def tables(self) -> tuple[Stored, ...]:
        """Return the tables of other files that equal ones are replaced by."""
        return self.known_tables + (self.basis.tables() if self.basis else ())

    def rope(self, layer: int) -> Rope | None:
        """Return the rope of a layer of the model, where it is known."""
        index = self.layer_ropes[layer] if layer < len(self.layer_ropes) else None
        return None if index is None else self.ropes[index]


def max_segments(layers: int) -> int:
    """Return how many carried-over segments each tensor of so many layers may have."""
    return min(MAX_SEGMENTS, ALL_SEGMENTS // (2 * max(1, layers)))
