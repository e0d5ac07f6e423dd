"""The file a cache grew from: what it holds is referred to, not written again.

A child file names tensors of its parent (``Stored.file``) for the tokens both
cover and holds the rest. Only whole segments can be referred to. Codes of a lossy
codec are taken as the parent has them: they stand for the same tokens under the
same model. Raw rows are compared, bit for bit, so that ``raw`` stays lossless.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx
import msgspec

from vkv import identity
from vkv.arrays.cache_file import CacheFile
from vkv.arrays.host_bytes import digest
from vkv.caches.encoded import Kept
from vkv.caches.prompt import common_prefix
from vkv.codecs.protocol import NAMES, Codec
from vkv.errors import MismatchError, VkvError
from vkv.format.kinds import leading_rows
from vkv.format.layers import walk
from vkv.format.schema import Header, Layer, Rope, Segment, Stored


@dataclass(frozen=True, slots=True)
class Held:
    """A segment that stands in another file.

    Attributes:
        segment: As the parent's header has it.
        stored: Its parts, ``file`` set.
        names: Their names in the parent.
        rope: What its keys were rotated back by.
    """

    segment: Segment
    stored: dict[str, Stored]
    names: dict[str, str]
    rope: Rope | None


class Parent:
    """An open file whose leading segments a new one may refer to.

    Args:
        file: The parent; stays open until the child is written.
        model: Identity of the model of the child, ``None`` if not known.
        tokens: Ids the child holds.

    Raises:
        MismatchError: The parent belongs to another model (I1).
    """

    def __init__(self, file: CacheFile, head: Header, tokens: object):
        self.file = file
        ours, theirs = head.model, file.header.model
        if ours is not None and theirs is not None and ours.id != theirs.id:
            raise MismatchError(["the parent was made with another model"], at=file.document.name)
        known = file.document.tokens() or []
        given = b"" if tokens is None else identity.token_bytes(tokens)
        self.common = common_prefix(known, memoryview(given).cast("I"))
        self._checked: set[str] = set()
        self._layers = {_dotted(at): layer for at, layer in walk(file.header.layers)}
        own = bytes.fromhex(file.document.id)
        self._stored = {
            name: stored if stored.file else msgspec.structs.replace(stored, file=own)
            for name, stored in file.header.tensors.items()
        }

    def tables(self) -> list[Stored]:
        """Tables that it holds or refers to."""
        return [stored for stored in self._stored.values() if stored.role == "table"]

    def held(self, at: str, live: Layer, name: str, x: mx.array, asked: Codec) -> list[Held]:
        """Leading segments of a tensor that stand for the rows of ``x``.

        Args:
            at: The layer, ``layers.3``, or ``layers.3.0`` for a child.
            live: Kind and scalars of the live cache.
            name: ``"keys"`` or ``"values"``.
            x: The live tensor, ``(B, H, T, D)``.
            asked: What would encode it; codes of other codecs are not taken.
        """
        layer = self._layers.get(at)
        if layer is None or layer.kind != live.kind or name not in layer.tensors:
            return []
        rows = min(
            self.common,
            leading_rows(layer, layer.tensors[name].shape[-2]),
            leading_rows(live, x.shape[-2]),
        )
        lossless = asked.traits.lossless
        found: list[Held] = []
        whole = 0
        for held, start, stop in self._leading(layer, name, x, rows):
            coded = not held.segment.is_raw
            if (coded and not _is(held.segment, asked)) or (
                lossless and not self._same(held, x[..., start:stop, :])
            ):
                break
            found.append(held)
            if coded or lossless:
                whole = len(found)
        taken = found[:whole]  # raw rows behind the last codes wait for a whole window
        self._check(taken)
        return taken

    def _check(self, found: list[Held]) -> None:
        """What is referred to is undamaged, so that damage does not spread (D1)."""
        for name in {name for held in found for name in held.names.values()} - self._checked:
            try:
                self.file.check(name)
            except VkvError as exc:
                raise exc.within(self.file.document.name) from None
            self._checked.add(name)

    def _leading(
        self, layer: Layer, name: str, x: mx.array, rows: int
    ) -> list[tuple[Held, int, int]]:
        """Return the segments within the first ``rows`` rows, each with its first row and stop."""
        tensor = layer.tensors[name]
        same = (*x.shape[:-2], x.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
        if not same or len(tensor.shape) != 4 or NAMES.get(x.dtype) != tensor.dtype:
            return []
        out: list[tuple[Held, int, int]] = []
        start = 0
        for segment in tensor.segments:
            stop = start + (segment.tokens or tensor.shape[-2])
            if stop > rows:
                break
            stored = {part: self._stored[where] for part, where in segment.parts.items()}
            rope = None if segment.rope is None else self.file.header.ropes[segment.rope]
            out.append((Held(segment, stored, segment.parts, rope), start, stop))
            start = stop
        return out

    def _same(self, held: Held, rows: mx.array) -> bool:
        """Compare a lossless segment with ``rows``, bit for bit."""
        if held.segment.is_raw:
            return digest(rows) == held.stored["data"].digest
        decoded = self.kept(held, rows.shape).decode(rows.shape, rows.dtype)
        return digest(decoded) == digest(rows)

    def kept(self, held: Held, shape: tuple[int, ...]) -> Kept:
        """The codes themselves, for codecs that go on with their tables."""
        rows = (*shape[:-2], held.segment.tokens or shape[-2], shape[-1])
        codec, parts = self.file.parts(held.segment, rows)
        roles = {part: stored.role for part, stored in held.stored.items()}
        return Kept(codec, parts, rows[-2], roles, held.rope)


def _dotted(at: str) -> str:
    """``layers[3].children[0]`` as the names of stored tensors start: ``layers.3.0``."""
    return at.replace(".children", "").replace("[", ".").replace("]", "")


def _is(segment: Segment, asked: Codec) -> bool:
    """Whether a segment was written by the codec asked for."""
    if (segment.codec, segment.version) != (asked.id, asked.version):
        return False
    if asked.traits.plans:
        return True  # its params are the plan's
    params = dataclasses.asdict(asked)  # type: ignore[call-overload]
    return {**params, "pre_rope": None} == {**segment.params, "pre_rope": None}
