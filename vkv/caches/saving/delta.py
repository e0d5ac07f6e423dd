"""Refer to the file a cache grew from: what that file holds is not written again.

A delta names tensors of its parent (``Stored.file``) for the tokens both cover and
holds the rest. Only whole segments can be referred to. Codes of a lossy codec are
taken as the parent has them: they stand for the same tokens under the same model.
Raw rows are compared, bit for bit, so that ``raw`` stays lossless.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx
import msgspec

from vkv import identity
from vkv.arrays.cache_file import CacheFile
from vkv.arrays.host_bytes import digest
from vkv.caches.encoded import EncodedRun
from vkv.codecs.protocol import NAMES, Codec
from vkv.errors import MismatchError, VkvError
from vkv.format.kinds import leading_rows
from vkv.format.layers import walk
from vkv.format.schema import Layer, Model, Rope, Segment, Stored


@dataclass(frozen=True, slots=True)
class ReferencedSegment:
    """A segment of the parent that the new file refers to.

    Attributes:
        segment: As the parent's header has it.
        stored: Its parts, ``file`` set.
        names: Their names in the parent.
        tokens: How many it covers.
        rope: Undone on its keys before they were encoded.
        tables: All tables that the parent holds or refers to; not worth a second file alone.
    """

    segment: Segment
    stored: dict[str, Stored]
    names: dict[str, str]
    tokens: int
    rope: Rope | None
    tables: tuple[Stored, ...]


class ParentFile:
    """An open file whose leading segments a new one may refer to.

    Args:
        file: The parent; stays open until the new file is written.
        model: Identity of the model of the new file, ``None`` if not known.
        tokens: Ids the new file holds.

    Raises:
        MismatchError: The parent belongs to another model (I1).
    """

    def __init__(self, file: CacheFile, model: Model | None, tokens: object):
        self._file = file
        theirs = file.header.model
        if model is not None and theirs is not None and model.id != theirs.id:
            raise MismatchError(["the parent was made with another model"], at=file.document.name)
        known = file.document.tokens() or []
        given = b"" if tokens is None else identity.token_bytes(tokens)
        self._common = identity.common_prefix(known, memoryview(given).cast("I"))
        self._checked: set[str] = set()
        self._layers = {_dotted(at): layer for at, layer in walk(file.header.layers)}
        own = bytes.fromhex(file.document.id)
        self._stored = {
            name: stored if stored.file else msgspec.structs.replace(stored, file=own)
            for name, stored in file.header.tensors.items()
        }
        self._tables = tuple(s for s in self._stored.values() if s.role == "table")

    def referenced(
        self, at: str, live: Layer, name: str, x: mx.array, asked: Codec
    ) -> list[ReferencedSegment]:
        """Return the leading segments of a tensor that stand for the first rows of ``x``.

        Args:
            at: The layer, ``layers.3``, or ``layers.3.0`` for a child.
            live: Kind and scalars of the live cache.
            name: ``"keys"`` or ``"values"``.
            x: The live tensor, ``(B, H, T, D)``.
            asked: What would encode it; codes of other codecs are not taken.
        """
        lossless = asked.traits.lossless
        candidates: list[ReferencedSegment] = []
        whole = start = 0
        for segment in self._leading(at, live, name, x):
            coded = not segment.segment.is_raw
            stop = start + segment.tokens
            if (coded and not _is(segment.segment, asked)) or (
                lossless and not self._same(segment, x[..., start:stop, :])
            ):
                break
            candidates.append(segment)
            start = stop
            if coded or lossless:
                whole = len(candidates)
        taken = candidates[:whole]  # raw rows behind the last codes wait for a whole window
        self._check(taken)
        return taken

    def run(self, segment: ReferencedSegment, shape: tuple[int, ...]) -> EncodedRun:
        """Return the codes themselves; ``shape`` gives all but the tokens."""
        rows = (*shape[:-2], segment.tokens, shape[-1])
        codec, parts = self._file.parts(segment.segment, rows)
        roles = {part: stored.role for part, stored in segment.stored.items()}
        return EncodedRun(codec, parts, segment.tokens, roles, segment.rope)

    def _leading(self, at: str, live: Layer, name: str, x: mx.array) -> list[ReferencedSegment]:
        """Return the segments of rows that stand for the same tokens in both files."""
        layer = self._layers.get(at)
        if layer is None or layer.kind != live.kind or name not in layer.tensors:
            return []
        tensor = layer.tensors[name]
        same = (*x.shape[:-2], x.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
        if not same or len(tensor.shape) != 4 or NAMES.get(x.dtype) != tensor.dtype:
            return []
        own, new = leading_rows(layer, tensor.shape[-2]), leading_rows(live, x.shape[-2])
        left = min(self._common, own, new)
        out: list[ReferencedSegment] = []
        for segment in tensor.segments:
            tokens = segment.tokens or tensor.shape[-2]
            left -= tokens
            if left < 0:
                break
            out.append(self._reference(segment, tokens))
        return out

    def _reference(self, segment: Segment, tokens: int) -> ReferencedSegment:
        stored = {part: self._stored[name] for part, name in segment.parts.items()}
        rope = None if segment.rope is None else self._file.header.ropes[segment.rope]
        return ReferencedSegment(segment, stored, segment.parts, tokens, rope, self._tables)

    def _check(self, taken: list[ReferencedSegment]) -> None:
        """Check the digests of what is referred to, so that damage does not spread (D1)."""
        for name in {name for s in taken for name in s.names.values()} - self._checked:
            try:
                self._file.check(name)
            except VkvError as exc:
                raise exc.of_file(self._file.document.name) from None
            self._checked.add(name)

    def _same(self, segment: ReferencedSegment, rows: mx.array) -> bool:
        """Compare a lossless segment with ``rows``, bit for bit."""
        if segment.segment.is_raw:
            return digest(rows) == segment.stored["data"].digest
        decoded = self.run(segment, rows.shape).decode(rows.shape, rows.dtype)
        return digest(decoded) == digest(rows)


def _dotted(at: str) -> str:
    """Turn ``layers[3].children[0]`` into the prefix of stored tensors, ``layers.3.0``."""
    return at.replace(".children", "").replace("[", ".").replace("]", "")


def _is(segment: Segment, asked: Codec) -> bool:
    """Return whether a segment was written by the codec asked for."""
    if (segment.codec, segment.version) != (asked.id, asked.version):
        return False
    if asked.traits.plans:
        return True  # its params are the plan's
    params = dataclasses.asdict(asked)  # type: ignore[call-overload]
    return {**params, "pre_rope": None} == {**segment.params, "pre_rope": None}
