"""Drafts of layers and tensors: what is known of them before any is encoded, and the encoding.

Decides, for each tensor, which segments are kept from the file it came from,
which codec takes the rest, and what is stored raw and why.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx
from msgspec import structs

from vkv.caches.encoded import Kept, encode, follows, joined
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.caches.provenance import Origin
from vkv.caches.rope import rotate, usable
from vkv.caches.saving.delta import Held
from vkv.caches.saving.write_plan import Plan
from vkv.codecs.protocol import NAMES, Codec, Parts, Planned
from vkv.codecs.raw import Raw
from vkv.errors import VkvError
from vkv.format.kinds import positions
from vkv.format.schema import Layer, Segment, Tensor


@dataclass(frozen=True, slots=True)
class LayerDraft:
    """One cache and its children, taken apart and not yet encoded."""

    snapshot: Snapshot
    tensors: dict[str, TensorDraft]
    children: tuple[LayerDraft, ...]

    def walk(self) -> list[LayerDraft]:
        """Itself, then its children's own."""
        return [self, *(below for child in self.children for below in child.walk())]

    def build(self) -> Layer:
        """Encode all tensors, in file order."""
        return Layer(
            kind=self.snapshot.kind,
            scalars=self.snapshot.scalars,
            tensors={name: tensor.build() for name, tensor in self.tensors.items()},
            children=tuple(child.build() for child in self.children),
        )


def draft(plan: Plan, snapshot: Snapshot, path: str, top: int) -> LayerDraft:
    """Plan one cache and its children.

    Args:
        plan: Receives the tensors when the draft is built.
        snapshot: The cache, taken apart.
        path: Prefix of its tensors' names, ``layers.3``.
        top: Index of the layer of the model, for its rope.
    """
    layer = Layer(kind=snapshot.kind, scalars=snapshot.scalars)
    latent = _is_latent(snapshot)
    origin = None if plan.reencode else snapshot.origin
    rope = plan.layer_ropes[top] if top < len(plan.layer_ropes) else None
    tensors = {
        name: TensorDraft(plan, layer, name, value, f"{path}.{name}", rope, latent, origin)
        for name, value in sorted(snapshot.values.items())
    }
    children = tuple(
        draft(plan, child, f"{path}.{i}", top) for i, child in enumerate(snapshot.children)
    )
    return LayerDraft(snapshot, tensors, children)


class TensorDraft:
    """One tensor: the codes it keeps, the rows behind them, and the codec of those.

    Attributes:
        value: The whole tensor.
        held: Segments that stand in another file, in front of all else.
        kept: Codes that are stored as they are.
        x: Rows behind them, ``(B, H, T, D)``; ``None`` for none.
        start: Index of the first of these rows.
        codec: What encodes them.
    """

    def __init__(
        self,
        plan: Plan,
        layer: Layer,
        name: str,
        value: Value,
        path: str,
        rope: int | None,
        latent: bool,
        origin: Origin | None,
    ):
        self.plan, self.layer, self.name, self.value = plan, layer, name, value
        self.path, self.rope, self.latent = path, rope, latent
        self.segments: list[Segment] = []
        self.note: str | None = None
        self.choice = plan.wish.of(name)
        self.held, self.before = self._held()
        self.kept, self.x = self._split(origin)
        self.before = self.kept[-1] if self.kept else self.before
        self.start += sum(k.tokens for k in self.kept)
        self.codec: Codec = self._raw() if self.x is None else self._chosen(self.x)
        self._planned: Parts | None = None

    def take(self, planned: Planned) -> None:
        """Put what a plan gives in the place of ``codec``."""
        self.codec, self._planned = planned.codec, planned.parts
        if planned.note is not None:
            self.note = f"asked for {self.choice.text}, stored raw: {planned.note}"

    def build(self) -> Tensor:
        for held in self.held:
            self._refer(held)
        for piece in joined(self.kept) if len(self.kept) > self.plan.most_segments else self.kept:
            self._keep(piece)
        if self.x is not None and self.value.tokens:
            self._encode(self.x, self.codec)
        elif self.x is not None:
            self._add(self._raw(), self.x, None)
        return Tensor(
            dtype=NAMES[self.value.dtype],
            shape=self.value.shape,
            segments=tuple(self.segments),
            note=self.note,
        )

    def _held(self) -> tuple[list[Held], Kept | None]:
        """Segments of the parent, and the last of them as codes; ``start`` is behind them."""
        self.start = 0
        parent, x = self.plan.parent, self.value.x
        if parent is None or x is None or self.value.kept or not self.value.tokens:
            return [], None
        at = self.path.removesuffix(f".{self.name}")
        held = parent.held(at, self.layer, self.name, x, self._chosen(x))
        if not held or len(held) > self.plan.most_segments:
            return [], None
        self.plan.know(parent.tables())  # not worth a second file on their own
        self.start = sum(h.segment.tokens or self.value.shape[-2] for h in held)
        goes_on = self.choice.codec.traits.reuses_tables and self.start < x.shape[-2]
        return held, parent.kept(held[-1], x.shape) if goes_on else None

    def _split(self, origin: Origin | None) -> tuple[list[Kept], mx.array | None]:
        """Codes that are kept, and the rows behind them."""
        kept, x = list(self.value.kept), self.value.x
        if self.held and x is not None:
            x = x[..., self.start :, :]
        elif x is not None and origin is not None and not kept and self.value.tokens:
            kept = origin.kept(self.name, x)
            x = x[..., sum(k.tokens for k in kept) :, :]
        elif kept and not self._asked_for_raw and self.choice.codec is not type(kept[-1].codec):
            self.note = f"asked for {self.choice.text}, stored as the codes the cache holds"
        return kept, x

    def _chosen(self, x: mx.array) -> Codec:
        """The codec asked for, or ``raw`` and a note that says why."""
        if not self.value.tokens:
            reason: str | None = "recurrent state"
        else:
            codec = self.choice.configure(self.name, NAMES[self.value.dtype])
            reason = self._refused(codec, x)
            if reason is None:
                return codec
        if not self._asked_for_raw:
            self.note = f"asked for {self.choice.text}, stored raw: {reason}"
        return self._raw()

    @property
    def _asked_for_raw(self) -> bool:
        return self.choice.codec.traits.verbatim

    def _raw(self) -> Raw:
        return Raw(dtype=NAMES[self.value.dtype])

    def _refer(self, held: Held) -> None:
        parts = {
            part: self.plan.refer(f"{self.path}.{len(self.segments)}.{part}", stored)
            for part, stored in held.stored.items()
        }
        rope = None if held.rope is None else self.plan.rope(held.rope)
        tokens = held.segment.tokens or self.value.shape[-2]
        self.segments.append(structs.replace(held.segment, parts=parts, rope=rope, tokens=tokens))

    def _keep(self, kept: Kept) -> None:
        order = [part for part in kept.codec.roles if part in kept.parts]  # as when it was encoded
        names = {p: self._store(p, kept.roles[p], kept.parts[p]) for p in order}
        rope = None if kept.rope is None else self.plan.rope(kept.rope)
        self._append(kept.codec, kept.tokens, names, rope)

    def _encode(self, x: mx.array, codec: Codec) -> None:
        """Segments for the rows behind the codes: sinks, codes, residual."""
        rest, start = x.shape[-2], self.start
        lead, body = codec.span(rest, start)
        if follows(codec, self.before):
            lead, body = 0, rest
        if body == 0 and start == 0 and rest:
            self.note = f"asked for {self.choice.text}, stored raw: only {rest} tokens"
        if codec.traits.verbatim and self.value.kept:
            lead = body = 0  # behind codes that a live cache holds comes its exact tail
        self._add(self._raw(), x[..., :lead, :], "sink")
        self._body(codec, x[..., lead : lead + body, :], start + lead)
        self._add(self._raw(), x[..., lead + body :, :], "residual")

    def _refused(self, codec: Codec, x: mx.array) -> str | None:
        if self.latent:
            return "MLA latents: an error in one reaches every head"
        if not x.size:
            return None if self.start else "no elements"
        return codec.refuses(x.shape, x.dtype)

    def _body(self, codec: Codec, x: mx.array, start: int) -> None:
        rope = None
        if codec.pre_rope:
            x, rope = self.unrotated(x, start)
            if rope is None:
                codec = codec.for_rotated_keys()
        self._add(codec, x, None, rope)

    def unrotated(self, x: mx.array, start: int) -> tuple[mx.array, int | None]:
        """Keys ``x`` from row ``start`` on without their rope, and its index.

        As they are, and ``None``, where the rope is not known or cannot be undone.
        """
        where = positions(self.layer, self.value.shape[-2])[start : start + x.shape[-2]]
        known = self.plan.ropes[self.rope] if self.rope is not None else None
        if known is None or not usable(known, x, where):
            return x, None
        return rotate(x, known, where, inverse=True), self.rope

    def _add(self, codec: Codec, x: mx.array, role: str | None, rope: int | None = None) -> None:
        """Encode ``x`` with ``codec`` as one segment; nothing for no tokens."""
        if self.value.tokens and x.shape[-2] == 0:
            return
        try:
            parts = self._parts(codec, x)
        except VkvError as exc:
            raise exc.within(self.path) from None
        names = {
            p: self._store(p, role or codec.roles[p], parts[p]) for p in codec.roles if p in parts
        }
        self._append(codec, x.shape[-2] if self.value.tokens else None, names, rope)

    def _parts(self, codec: Codec, x: mx.array) -> Parts:
        """Those of the plan, which are let go here, or what the codec gives now."""
        if self._planned is not None and not codec.traits.verbatim:
            planned, self._planned = self._planned, None
            return planned
        return encode(codec, x, self.before)

    def _store(self, part: str, role: str, x: mx.array) -> str:
        return self.plan.add(f"{self.path}.{len(self.segments)}.{part}", role, x)

    def _append(
        self, codec: Codec, tokens: int | None, parts: dict[str, str], rope: int | None
    ) -> None:
        self.segments.append(
            Segment(
                codec=codec.id,
                version=codec.version,
                params=dataclasses.asdict(codec),  # type: ignore[call-overload]
                tokens=tokens,
                parts=parts,
                rope=rope,
            )
        )


def _is_latent(snapshot: Snapshot) -> bool:
    """MLA: one shared "head" whose keys and values are latents of different widths."""
    keys, values = snapshot.values.get("keys"), snapshot.values.get("values")
    if keys is None or values is None or len(keys.shape) != 4:
        return False
    return keys.shape[1] == 1 and keys.shape[3] != values.shape[3]
