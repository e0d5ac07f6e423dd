"""Plan how each tensor of a cache is stored, before any is encoded.

For each tensor: which segments of a parent file are referred to, which codes are
stored as they are, and which codec encodes the rows behind them. A plan is decided
once and never changed; a codec that plans over all tensors makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from vkv.caches.encoded import EncodedRun, follows
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.caches.provenance import StoredLayer, stored_layer
from vkv.caches.rope import rotate, usable
from vkv.caches.saving.delta import ReferencedSegment
from vkv.caches.saving.request import SaveRequest
from vkv.codecs.protocol import NAMES, Codec, Parts, Planned
from vkv.codecs.raw import Raw
from vkv.codecs.registry import CodecRequest
from vkv.format.kinds import positions
from vkv.format.layers import LATENTS, is_latent
from vkv.format.positions import Spans
from vkv.format.schema import Layer, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Say how one tensor is stored: referenced segments, encoded runs, rows to be encoded.

    Attributes:
        path: Prefix of the names of its stored tensors, ``layers.3.keys``.
        name: ``"keys"``, ``"values"``, or a slot of recurrent state.
        layer: Kind and scalars of its cache.
        value: The whole tensor.
        asked: The codec that was asked for.
        referenced: Segments of the parent file, in front of all else.
        runs: Codes that are stored as they are, behind them.
        rows: What follows, ``(B, H, T, D)``; ``None`` for nothing.
        start: Index of the first of these rows.
        codec: Encodes them.
        lead: Leading rows that are stored raw, as sinks.
        body: Rows behind those that are encoded; all further ones are stored raw.
        before: The run before the rows, for a codec that goes on with its tables.
        rope: Undone on the rows before they are encoded.
        parts: The encoded body, where a plan over all tensors made it already.
        note: Why the codec that was asked for is not used.
    """

    path: str
    name: str
    layer: Layer
    value: Value
    asked: CodecRequest
    referenced: tuple[ReferencedSegment, ...] = ()
    runs: tuple[EncodedRun, ...] = ()
    rows: mx.array | None = None
    start: int = 0
    codec: Codec
    lead: int = 0
    body: int = 0
    before: EncodedRun | None = None
    rope: Rope | None = None
    parts: Parts | None = None
    note: str | None = None

    def unrotated(self, x: mx.array, start: int) -> mx.array:
        """Return ``x``, rows from ``start`` on, as float32 without their rope, or as it is."""
        if self.rope is None:
            return x
        return rotate(x, self.rope, self._positions(start, x.shape[-2]), inverse=True)

    def _positions(self, start: int, count: int) -> Spans:
        return positions(self.layer, self.value.shape[-2])[start : start + count]

    def with_planned(self, planned: Planned) -> TensorPlan:
        """Return the plan with the codec and the parts that a plan over all tensors chose."""
        codec, note = planned.codec, self.note
        if planned.note is not None:
            note = f"asked for {self.asked.text}, stored raw: {planned.note}"
        rope = self.rope if codec.pre_rope else None
        if rope is None:
            codec = codec.for_rotated_keys()
        lead, body = _split(codec, self)
        return replace(
            self, codec=codec, lead=lead, body=body, rope=rope, parts=planned.parts, note=note
        )


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plans for one cache and its children."""

    snapshot: Snapshot
    tensors: dict[str, TensorPlan]
    children: tuple[LayerPlan, ...]

    def walk(self) -> list[LayerPlan]:
        """Return itself, then its children's own."""
        return [self, *(below for child in self.children for below in child.walk())]


def plan_layer(request: SaveRequest, snapshot: Snapshot, path: str, top: int) -> LayerPlan:
    """Plan one cache and its children.

    Args:
        request: What was asked of the save.
        snapshot: The cache, taken apart.
        path: Prefix of its tensors' names, ``layers.3``.
        top: Index of the layer of the model, for its rope.
    """
    tensors = {name: _plan_tensor(request, snapshot, name, path, top)
               for name in sorted(snapshot.values)}  # fmt: skip
    children = tuple(
        plan_layer(request, child, f"{path}.{i}", top) for i, child in enumerate(snapshot.children)
    )
    return LayerPlan(snapshot, tensors, children)


def _plan_tensor(
    request: SaveRequest, snapshot: Snapshot, name: str, path: str, top: int
) -> TensorPlan:
    value, asked = snapshot.values[name], request.codecs.of(name)
    layer = Layer(kind=snapshot.kind, scalars=snapshot.scalars)
    plan = TensorPlan(
        path=f"{path}.{name}", name=name, layer=layer, value=value, asked=asked, codec=_raw(value)
    )
    wanted = asked.configure(name, NAMES[value.dtype])
    reason = _refused(snapshot, value, wanted)
    plan = _with_referenced(request, plan, plan.codec if reason else wanted)
    plan = _with_runs(plan, stored_layer(request.sources, snapshot.provenance))
    if plan.rows is None:
        return plan
    if reason is None and plan.rows.size == 0 and plan.start == 0:
        reason = "no elements"
    if reason is not None:
        note = f"asked for {asked.text}, stored raw: {reason}"
        plan = replace(plan, note=plan.note if asked.codec.traits.verbatim else note)
    return _with_codec(plan, plan.codec if reason else wanted, request.rope(top))


def _raw(value: Value) -> Raw:
    return Raw(dtype=NAMES[value.dtype])


def _refused(snapshot: Snapshot, value: Value, codec: Codec) -> str | None:
    """Return why a tensor is stored raw whatever was asked for, or ``None``."""
    if not codec.traits.lossless:
        if not value.tokens:
            return "recurrent state"
        if _is_latent(snapshot):
            return LATENTS
    if value.x is None or not value.x.size:
        return None
    return codec.refuses(value.x.shape, value.x.dtype)


def _is_latent(snapshot: Snapshot) -> bool:
    keys, values = snapshot.values.get("keys"), snapshot.values.get("values")
    return keys is not None and values is not None and is_latent(keys.shape, values.shape)


def _with_referenced(request: SaveRequest, plan: TensorPlan, codec: Codec) -> TensorPlan:
    """Refer to the segments of the parent that stand for the tensor's first rows."""
    parent, x = request.parent, plan.value.x
    if parent is None or x is None or plan.value.encoded or not plan.value.tokens:
        return plan
    at = plan.path.removesuffix(f".{plan.name}")
    segments = parent.referenced(at, plan.layer, plan.name, x, codec)
    if not segments or len(segments) > request.max_segments:
        return plan
    start = sum(segment.tokens for segment in segments)
    goes_on = codec.traits.reuses_tables and start < x.shape[-2]
    before = parent.run(segments[-1], x.shape) if goes_on else None
    return replace(plan, referenced=tuple(segments), start=start, before=before)


def _with_runs(plan: TensorPlan, source: StoredLayer | None) -> TensorPlan:
    """Keep codes: those that the cache holds, or those of the file that it came from."""
    value, note, runs = plan.value, plan.note, list(plan.value.encoded)
    other = runs and plan.asked.codec is not type(runs[-1].codec)
    if other and not plan.asked.codec.traits.verbatim:
        note = f"asked for {plan.asked.text}, stored as the codes the cache holds"
    if value.x is None:
        return replace(plan, runs=tuple(runs), note=note)
    offset = 0 if runs else plan.start  # rows of x that stand before
    if not runs and source is not None and value.tokens:
        runs = source.runs(plan.name, value.x, plan.start)
        offset += sum(run.tokens for run in runs)
    start = plan.start + sum(run.tokens for run in runs)
    rows = value.x[..., offset:, :] if value.tokens else value.x
    before = runs[-1] if runs else plan.before
    return replace(plan, runs=tuple(runs), rows=rows, start=start, before=before, note=note)


def _with_codec(plan: TensorPlan, codec: Codec, rope: Rope | None) -> TensorPlan:
    """Choose sinks, body and rest of the rows, and the rope that is undone on the body."""
    rows = plan.rows
    assert rows is not None  # else there is nothing to encode
    if not plan.value.tokens:
        return replace(plan, codec=codec)
    lead, body = _split(codec, plan)
    note = plan.note
    if body == 0 and plan.start == 0 and rows.shape[-2]:
        note = f"asked for {plan.asked.text}, stored raw: only {rows.shape[-2]} tokens"
    if not codec.pre_rope or not body:
        rope = None
    elif rope is not None:
        where = plan._positions(plan.start + lead, body)
        rope = rope if usable(rope, rows[..., lead : lead + body, :], where) else None
    if codec.pre_rope and rope is None:
        codec = codec.for_rotated_keys()
    return replace(plan, codec=codec, lead=lead, body=body, rope=rope, note=note)


def _split(codec: Codec, plan: TensorPlan) -> tuple[int, int]:
    """Split the rows: how many are sinks, and how many behind them are encoded."""
    count = 0 if plan.rows is None else plan.rows.shape[-2]
    if follows(codec, plan.before):
        return 0, count
    if codec.traits.verbatim and plan.runs:
        return 0, 0  # behind codes comes their exact tail, the residual
    return codec.span(count, plan.start)
