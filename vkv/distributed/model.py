"""Identify a model whose weights are spread over ranks: as one process identifies the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from vkv.distributed.ranks import Ranks
from vkv.errors import CacheError, VkvError
from vkv.format.schema import Model, Rope
from vkv.identity.config import ModuleCounts, config_texts, module_counts
from vkv.identity.model import (
    count,
    digest,
    dtype,
    float_dtypes,
    identified,
    parameters,
    require_model,
    sampled_bits,
    spread,
)
from vkv.identity.ropes import find

#: Layers of MLX whose parameters are split over ranks, and the word that tells how.
_ALL_TO_SHARDED = ("AllToShardedLinear", "QuantizedAllToShardedLinear")
_SHARDED_TO_ALL = ("ShardedToAllLinear", "QuantizedShardedToAllLinear")


@dataclass(frozen=True, slots=True)
class Slice:
    """One parameter as a rank has it.

    Attributes:
        name: Within its layer, or in the model.
        x: The rank's values.
        axis: Along which ranks have one part each; ``None`` where all have the whole.
    """

    name: str
    x: Any
    axis: int | None

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(n * ranks if i == self.axis else n for i, n in enumerate(self.x.shape))


def is_pipelined(model: Any) -> bool:
    """Tell whether each rank has some layers of the model, and not a part of every layer."""
    inner = getattr(model, "model", None)
    return int(getattr(inner, "pipeline_size", 1)) > 1


def first_layer(model: Any) -> int:
    """Return the index of a rank's first layer in the whole model."""
    return int(getattr(model.model, "start_idx", 0)) if is_pipelined(model) else 0


def of_sharded(ranks: Ranks, model: Any) -> tuple[Model, tuple[Rope, ...]]:
    """Identify a live model that is spread over ranks; arguments and result as ``of_model``.

    Raises:
        VkvError: It is no model, or ranks split a parameter in a way that is not known.
    """
    if is_pipelined(model):
        return _of_pipeline(ranks, model)
    layers, rest = ranks.agree(lambda: _slices(model))
    groups = [*layers, rest]
    digests = _digests(ranks, groups)
    arrays = {id(s.x): s for group in groups for s in group}
    sizes = {key: s.x.size * (1 if s.axis is None else ranks.size) for key, s in arrays.items()}
    return ranks.agree(
        lambda: identified(
            model,
            layers=tuple(digests[:-1]),
            rest=digests[-1],
            total=count(model, sizes),
            config=config_texts(model, float_dtypes(s.x for s in arrays.values())),
            ropes=find(model),
        )
    )


def _slices(model: Any) -> tuple[list[list[Slice]], list[Slice]]:
    require_model(model, "named_modules")
    axes = _axes(model)
    layers, rest = parameters(model)
    groups = [
        [Slice(name, x, axes.get(id(x))) for name, x in sorted(group.items())]
        for group in (*layers, rest)
    ]
    return groups[:-1], groups[-1]


def _axes(model: Any) -> dict[int, int]:
    """Return the axis along which each parameter of a sharded linear layer is split."""
    axes: dict[int, int] = {}
    for _, module in model.named_modules():
        kind = type(module).__name__
        for name, x in module.items() if kind in (*_ALL_TO_SHARDED, *_SHARDED_TO_ALL) else ():
            if kind in _ALL_TO_SHARDED and hasattr(x, "ndim"):
                axes[id(x)] = x.ndim - 1 if name == "bias" else max(x.ndim - 2, 0)
            elif hasattr(x, "ndim") and name != "bias":
                axes[id(x)] = x.ndim - 1
    return axes


def _digests(ranks: Ranks, groups: list[list[Slice]]) -> list[bytes]:
    """Return the digest of each group, made of the values that each rank has of the sample."""
    flat = [s for group in groups for s in group]
    forms = [(s.name, dtype(s.x), s.x.shape, s.axis) for s in flat]
    ranks.same(msgspec.msgpack.encode(forms), lambda rank: _unlike(f"parameters of rank {rank}"))
    raw = ranks.gather(ranks.agree(lambda: _sampled(ranks, flat)))
    samples, at = [], 0
    for s in flat:
        bits, taken = _joined(ranks.size, s, [x[at:] for x in raw])
        samples.append((s.name, dtype(s.x), s.shape(ranks.size), bits))
        at += taken
    numbers = iter(samples)
    return [digest([next(numbers) for _ in group]) for group in groups]


def _unlike(what: str) -> CacheError:
    return CacheError(f"{what} are others than those of rank 0, expected the same forms", rule="I7")


def _sampled(ranks: Ranks, slices: Iterable[Slice]) -> bytes:
    """Return the sampled bits of all parameters; where another rank has one, bits of this rank."""
    import mlx.core as mx

    bits = []
    for s in slices:
        local = [
            mx.array([i % s.x.shape[axis] for i in where], dtype=mx.uint32)
            for axis, where in enumerate(spread(s.shape(ranks.size)) if s.x.size else [])
        ]
        bits.append(sampled_bits(s.x, tuple(local)))
    return np.array(mx.concatenate(bits)).tobytes() if bits else b""


def _joined(size: int, s: Slice, raw: list[bytes]) -> tuple[bytes, int]:
    """Return the sampled bits of one whole parameter, and the bytes it has in ``raw``.

    Raises:
        VkvError: Ranks have other values of a parameter that is not known to be split.
    """
    where = spread(s.shape(size)) if s.x.size else []
    width = s.x.itemsize
    taken = (len(where[0]) if where else 1 if s.x.size else 0) * width
    if s.axis is None:
        if any(other[:taken] != raw[0][:taken] for other in raw[1:]):
            raise VkvError(
                f"parameter {s.name} differs from rank to rank: the model is split in a way that "
                "is not known here; only linear layers of MLX that are sharded by shard_linear are"
            )
        return raw[0][:taken], taken
    owners = [i // s.x.shape[s.axis] for i in where[s.axis]]
    return b"".join(raw[r][j * width : (j + 1) * width] for j, r in enumerate(owners)), taken


def _of_pipeline(ranks: Ranks, model: Any) -> tuple[Model, tuple[Rope, ...]]:
    """Identify a model of which each rank has some layers, and all have the rest."""
    stages = [
        msgspec.msgpack.decode(raw, type=_Stage)
        for raw in ranks.gather(ranks.agree(lambda: msgspec.msgpack.encode(_stage(model))))
    ]
    if any((s.rest, s.outside) != (stages[0].rest, stages[0].outside) for s in stages):
        raise VkvError("weights outside the layers differ from rank to rank")
    ordered = sorted(stages, key=lambda stage: stage.first)
    outside = stages[0].outside
    counts: ModuleCounts = {
        name: sum((Counter(s.counts[name]) for s in stages), Counter(outside[name]))
        for name in outside
    }
    dtypes = {name for stage in stages for name in stage.dtypes}
    return identified(
        model,
        layers=tuple(x for stage in ordered for x in stage.layers),
        rest=stages[0].rest,
        total=sum(stage.inside for stage in stages) + stages[0].others,
        config=config_texts(model, dtypes, counts),
        ropes=[rope for stage in ordered for rope in stage.ropes],
    )


class _Stage(msgspec.Struct, frozen=True):
    """Hold what one rank of a pipeline knows of its layers, and of the parameters that all have."""

    first: int
    layers: list[bytes]
    rest: bytes
    inside: int
    others: int
    dtypes: list[str]
    counts: dict[str, dict[str, int]]
    outside: dict[str, dict[str, int]]
    ropes: list[Rope | None]


def _stage(model: Any) -> _Stage:
    layers, rest = _slices(model)
    whole = {id(s.x): s.x.size for group in (*layers, rest) for s in group}
    others = count(model, {id(s.x): s.x.size for s in rest})
    inside = [module_counts(layer) for layer in model.layers]
    everything = module_counts(model)
    counts = {name: sum((c[name] for c in inside), Counter[str]()) for name in everything}
    outside = {name: counter - counts[name] for name, counter in everything.items()}
    return _Stage(
        first_layer(model),
        [_whole(group) for group in layers],
        _whole(rest),
        count(model, whole) - others,
        others,
        sorted(float_dtypes(s.x for group in (*layers, rest) for s in group)),
        {name: dict(counter) for name, counter in counts.items()},
        {name: dict(counter) for name, counter in outside.items()},
        find(model),
    )


def _whole(group: list[Slice]) -> bytes:
    """Return the digest of parameters that this rank has whole."""
    return digest(
        (s.name, dtype(s.x), s.x.shape, np.array(sampled_bits(s.x)).tobytes()) for s in group
    )
