"""Describe each kind of cache in one record: scalars, rows, positions, how far it can be cut.

All that can be said of a kind without MLX stands here; ``vkv.caches.kinds`` has the
module that takes such a cache apart and makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from vkv.errors import CacheError
from vkv.format.limits import BITS, GROUPS, MAX_SLOTS
from vkv.format.positions import Spans, ring_positions
from vkv.format.schema import Layer

Scalars = Mapping[str, int]
#: What the tensors of a layer are: keys and values as rows of tokens; the same as affine
#: codes; slots of recurrent state; none, but children.
Content = Literal["rows", "codes", "slots", "children"]


def _whole(scalars: Scalars) -> int | None:
    """Return 0: every token is still there."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of cache, as far as its scalars tell.

    Attributes:
        name: In the file; its meaning is in ``spec/v1/format.md``.
        class_names: Names of its class in mlx-lm, the newest release first.
        scalars: Names of the numbers a layer of this kind has.
        constants: Those of them that the model fixes and tokens never change.
        content: What its tensors are.
        stands_for: Kinds that a model makes and this one may take the place of.
        packs: Whether ``vkv.PackedKVCache`` may take its place.
        check_scalars: Refuse scalars that no cache has (L3, L5).
        expected_rows: Rows of keys and values; ``None`` where the scalars leave it open.
        check_rows: Refuse a number of rows that does not fit the scalars (L5).
        positions: Scalars and rows to the position of each row, in storage order.
        shortest: Fewest tokens that the cache can be cut back to with right logits after
            it; ``None`` where it cannot be cut at all (L8).
    """

    name: str
    class_names: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...] = ()
    content: Content = "rows"
    stands_for: tuple[str, ...] = ()
    packs: bool = False
    check_scalars: Callable[[Scalars], None] = lambda scalars: None
    expected_rows: Callable[[Scalars], int | None] = lambda scalars: scalars["offset"]
    check_rows: Callable[[Scalars, int], None] = lambda scalars, rows: None
    positions: Callable[[Scalars, int], Spans] = lambda scalars, rows: Spans([range(rows)])
    shortest: Callable[[Scalars], int | None] = _whole

    @property
    def lets_go(self) -> bool:
        """Tell if such a cache may let go of earlier tokens."""
        return self.shortest is not _whole


def _check_quantized(scalars: Scalars) -> None:
    if scalars["bits"] not in BITS or scalars["group_size"] not in GROUPS:
        found = f"{scalars['bits']} bits in groups of {scalars['group_size']}"
        raise CacheError(f"{found}, expected {BITS} in {GROUPS}", rule="L3")


def _check_ring(scalars: Scalars) -> None:
    if scalars["keep"] >= scalars["max_size"]:
        found = f"keep {scalars['keep']} of max_size {scalars['max_size']}, expected less"
        raise CacheError(found, rule="L5")


def _ring_rows(scalars: Scalars) -> int | None:
    return None if scalars["offset"] or scalars["idx"] else 0


def _check_ring_rows(scalars: Scalars, rows: int) -> None:
    """Check the rows of a ring; a prefill in one call leaves up to all tokens in it."""
    offset = scalars["offset"]
    low = scalars["keep"] if rows < offset else rows
    full = min(offset, scalars["max_size"])
    if not full <= rows <= offset or not low <= scalars["idx"] <= rows:
        raise CacheError(f"{rows} rows do not fit a ring of {dict(scalars)}", rule="L5")


def _ring_positions(scalars: Scalars, rows: int) -> Spans:
    return ring_positions(rows, scalars["offset"], scalars["keep"], scalars["idx"])


def _shortest_ring(scalars: Scalars) -> int | None:
    """Return 0 for a ring that still has every row; a full one has dropped some."""
    return 0 if scalars["offset"] < scalars["max_size"] else None


def _check_chunks(scalars: Scalars) -> None:
    if scalars["chunk_size"] == 0:
        raise CacheError("chunk_size 0, expected more", rule="L3")
    if scalars["start"] > scalars["offset"]:
        found = f"starts at {scalars['start']}, past its offset {scalars['offset']}"
        raise CacheError(found, rule="L5")


def _chunk_positions(scalars: Scalars, rows: int) -> Spans:
    return Spans([range(scalars["start"], scalars["start"] + rows)])


def _shortest_chunked(scalars: Scalars) -> int | None:
    """Return the first chunk whose start is still there: the next token sees its chunk from it."""
    first = -(-scalars["start"] // scalars["chunk_size"]) * scalars["chunk_size"]
    return first if first <= scalars["offset"] else None


def _check_slots(scalars: Scalars) -> None:
    if scalars["size"] > MAX_SLOTS:
        raise CacheError(f"{scalars['size']} slots, the limit is {MAX_SLOTS}", rule="L3")


#: Name -> kind. A new one also needs its module in ``vkv.caches.kinds``.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="kv", class_names=("KVCache",), scalars=("offset",), packs=True),
        Kind(
            name="concatenate",
            class_names=("ConcatenateKVCache",),
            scalars=("offset",),
            stands_for=("kv",),
        ),
        Kind(
            name="quantized",
            class_names=("QuantizedKVCache",),
            scalars=("offset", "bits", "group_size"),
            content="codes",
            stands_for=("kv",),
            check_scalars=_check_quantized,
        ),
        Kind(
            name="rotating",
            class_names=("RotatingKVCache",),
            scalars=("offset", "keep", "max_size", "idx"),
            constants=("keep", "max_size"),
            stands_for=("kv",),
            check_scalars=_check_ring,
            expected_rows=_ring_rows,
            check_rows=_check_ring_rows,
            positions=_ring_positions,
            shortest=_shortest_ring,
        ),
        Kind(
            name="chunked",
            class_names=("ChunkedKVCache",),
            scalars=("offset", "chunk_size", "start"),
            constants=("chunk_size",),
            check_scalars=_check_chunks,
            expected_rows=lambda scalars: scalars["offset"] - scalars["start"],
            positions=_chunk_positions,
            shortest=_shortest_chunked,
        ),
        Kind(
            name="arrays",
            class_names=("ArraysCache", "MambaCache"),
            scalars=("size",),
            constants=("size",),
            content="slots",
            check_scalars=_check_slots,
            expected_rows=lambda scalars: None,
            shortest=lambda scalars: None,
        ),
        Kind(
            name="list",
            class_names=("CacheList",),
            scalars=(),
            content="children",
            expected_rows=lambda scalars: None,
        ),
    )
}


def shortest(layers: tuple[Layer, ...]) -> int | None:
    """Return the fewest tokens that all of ``layers`` can be cut back to (L8).

    Returns:
        0 where any prefix can be had; ``None`` where none can, or where a layer is of
        an unknown kind or has scalars that no cache has.
    """
    longest = 0
    for layer in layers:
        own, inner = _shortest(layer), shortest(layer.children)
        if own is None or inner is None:
            return None
        longest = max(longest, own, inner)
    return longest


def _shortest(layer: Layer) -> int | None:
    kind = KINDS.get(layer.kind)
    if kind is None or not layer.scalars.keys() >= set(kind.scalars):
        return None
    try:
        kind.check_scalars(layer.scalars)
    except CacheError:
        return None
    return kind.shortest(layer.scalars)


def positions(layer: Layer, rows: int) -> Spans:
    """Return the absolute position of each row of a layer's keys, in storage order."""
    return KINDS[layer.kind].positions(layer.scalars, rows)


def leading_rows(layer: Layer, rows: int) -> int:
    """Return how many leading rows are those of tokens 0, 1, 2 and so on.

    Such rows stand for the same tokens in any cache that has grown from this one.
    """
    first = next(iter(positions(layer, rows).spans), range(0))
    return len(first) if first.start == 0 else 0
