"""``vkv.train_basis``: axes for the caches of one model, learnt from texts, as a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import vkv._version
from vkv import identity
from vkv.caches.basis.fisher import gradients
from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.kinds.live import snapshot
from vkv.caches.saving.request import Progress, SaveRequest, codec_pair
from vkv.caches.saving.tensor_plan import TensorPlan, plan_layer
from vkv.caches.saving.write import write
from vkv.codecs.protocol import Piece
from vkv.codecs.tc import basis as tc_basis
from vkv.codecs.tc import blocks as tc_blocks
from vkv.codecs.tc import rate_plan as tc_rate
from vkv.codecs.tc.basis import F64
from vkv.errors import VkvError
from vkv.format import header
from vkv.format.info import Info
from vkv.format.kinds import positions
from vkv.format.schema import Header

CODEC = "tc"
#: Tokens of one forward pass, and of one backward pass, which holds all layers' attention.
FORWARD, BACKWARD = 512, 64
#: Tokens a metric needs at least; and those of a context.
LEAST_PROBE, LEAST_CONTEXT = 2, 68


def train_basis(
    path: str | os.PathLike[str],
    model: Any,
    texts: Sequence[Any],
    *,
    tokenizer: Any = None,
    context: int = 2048,
    probe: int = 256,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Info:
    """Train axes for the caches of ``model`` and write them to a file.

    ``vkv.save(..., codec="tc:bits=1.7", basis=path)`` then stores no axes of its own,
    and spends bits where they help this model most: an error is weighed by the
    gradients of the model's own log-probabilities. Where a layer has no gradient (a
    custom kernel), by a rule from the caches alone; the metadata ``basis.weights`` says which.

    Args:
        path: Where to write, whole or not at all.
        model: An mlx-lm model.
        texts: Token ids of each text, ``context + probe`` or more; the first are used.
            A few thousand tokens in all, of the kind that will be saved, do.
        tokenizer: The tokenizer that made them.
        context: Tokens in the cache.
        probe: Tokens read after it, for the gradients; 0 for none.
        metadata: Text to text, stored as it is.
        durable: Flush to the disk before returning.
        progress: Called with (tokens done, tokens in all).

    Returns:
        What was written, as ``vkv.inspect`` tells it.

    Raises:
        VkvError: A text is too short, or no tensor of the model can have a basis.
        OSError: The file cannot be written.
    """
    texts = [_ids(text, context, probe) for text in texts]
    if not texts:
        raise VkvError("no text, expected one or more", at="texts")
    owner, ropes = identity.of_model(model)
    request = SaveRequest(codecs=codec_pair(CODEC), ropes=tuple(ropes), layer_ropes=owner.ropes)
    training = Training(request, probe)
    total, done = len(texts) * (context + probe), 0
    for seed, text in enumerate(texts):
        for count in training.read(model, text, seed):
            done += count
            if progress is not None:
                progress(done, total)
    tables = training.tables()
    head = Header(
        version=header.VERSION,
        producer=f"vkv {vkv._version.__version__}",
        model=owner,
        tokenizer=identity.of_tokenizer(tokenizer) if tokenizer is not None else None,
        layers=(),
        tensors={},
        metadata=header.metadata(training.metadata(len(texts), context) | dict(metadata or {})),
    )
    return write(path, head, request, (), tables=tables, durable=durable)


def _ids(text: Any, context: int, probe: int) -> list[int]:
    ids = np.array(text).reshape(-1).tolist()
    if context < LEAST_CONTEXT or probe < 0 or len(ids) < context + probe:
        raise VkvError(
            f"a text of {len(ids)} tokens, expected {context} of context (at least "
            f"{LEAST_CONTEXT}) and {probe} of probe",
            at="texts",
        )
    return ids[: context + probe]


class Training:
    """Sums over texts: second moments of each tensor's tokens, and what their errors cost."""

    def __init__(self, request: SaveRequest, probe: int):
        self._request, self._probe = request, probe
        self._moments: dict[str, F64] = {}
        self._fisher: dict[str, F64] = {}
        self._weights: dict[str, list[float]] = {}
        self._texts = 0
        self._reason = "" if probe else "no probe"

    def read(self, model: Any, tokens: list[int], seed: int) -> Iterator[int]:
        """Learn from one text; tells after each step how many tokens it took."""
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(model)
        context, probes = tokens[: len(tokens) - self._probe], tokens[-self._probe :]
        for at in range(0, len(context), FORWARD):
            step = context[at : at + FORWARD]
            mx.eval(model(mx.array([step]), cache=cache))
            yield len(step)
        self._texts += 1
        self._learn(_pieces(self._request, [snapshot(c) for c in cache]))
        for at in range(0, self._probe, BACKWARD):
            step = probes[at : at + BACKWARD]
            if not self._reason:
                snapshots = [snapshot(c) for c in cache]
                self._weigh(model, snapshots, step, len(context), seed * self._probe + at)
                mx.eval(model(mx.array([step]), cache=cache))
            yield len(step)

    def _learn(self, pieces: dict[str, tuple[Piece, TensorPlan]]) -> None:
        """Add to the moments, and to the weights that serve where there are no gradients."""
        weights = tc_rate.weights([piece for piece, _ in pieces.values()])
        for (path, (piece, _)), weight in zip(pieces.items(), weights, strict=True):
            z, _ = tc_blocks.centred(piece.x)
            self._moments[path] = self._moments.get(path, 0.0) + tc_basis.covariance(z)
            self._weights.setdefault(path, []).append(weight)

    def _weigh(
        self, model: Any, snapshots: list[Snapshot], step: list[int], context: int, seed: int
    ) -> None:
        """Add what the gradients of a few tokens say.

        By tokens of the context alone: the probe's own are near to those that follow, and
        would weigh as if all that is read of a cache were its end.
        """
        pieces = _pieces(self._request, snapshots)
        try:
            by_path = gradients(model, snapshots, list(pieces), step, seed)
        except (ValueError, RuntimeError, NotImplementedError) as exc:
            self._reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            return
        for path, (piece, tensor) in pieces.items():
            g = tc_blocks.flat(_pulled(tensor, by_path[path]))
            g = g[_between(tensor, piece.start, context)]
            self._fisher[path] = self._fisher.get(path, 0.0) + (g.T @ g).astype(np.float64)

    def tables(self) -> dict[str, mx.array]:
        """Return a basis for each tensor, by the name it has in the file.

        Raises:
            VkvError: There is no tensor that can have one.
        """
        count = self._texts * self._probe
        costs: dict[str, F64 | float] = {
            path: float(np.exp(np.mean(np.log(weights)))) for path, weights in self._weights.items()
        }
        if not self._reason:  # without a gradient (an index of top tokens): axes of its own
            costs = {path: f / count for path, f in self._fisher.items() if f.any()}
        if not costs:
            raise VkvError("no keys or values of this model can have a basis", at="train_basis")
        moments = [self._moments[path] / self._texts for path in costs]
        trained = tc_rate.train_basis(moments, list(costs.values()))
        return {f"{path}.basis": x for path, x in zip(costs, trained, strict=True)}

    def metadata(self, texts: int, context: int) -> dict[str, str]:
        """Return the metadata that records how the basis was made."""
        tokens = f"{texts} x {context}"
        if self._reason:
            return {"basis.tokens": tokens, "basis.weights": f"caches alone: {self._reason}"}
        return {
            "basis.tokens": tokens,
            "basis.weights": f"gradients of {texts} x {self._probe} tokens",
        }


def _pieces(
    request: SaveRequest, snapshots: Sequence[Snapshot]
) -> dict[str, tuple[Piece, TensorPlan]]:
    """Return the tensors that the codec takes, by path: rows behind the sinks, keys not rotated."""
    pieces = {}
    for i, taken in enumerate(snapshots):
        for place, layer in enumerate(plan_layer(request, taken, f"layers.{i}", i).walk()):
            for plan in layer.tensors.values():
                if plan.rows is None or not plan.codec.traits.takes_basis or not plan.body:
                    continue
                x = plan.unrotated(plan.rows[..., plan.lead :, :], plan.lead)
                piece = Piece(i + place, plan.name != "values", x, plan.lead)
                pieces[plan.path] = piece, plan
    return pieces


def _between(plan: TensorPlan, first: int, stop: int) -> list[int]:
    """Return the rows of a tensor whose tokens are at positions from ``first`` to ``stop``."""
    where = positions(plan.layer, plan.value.shape[-2])
    return [row for row, position in enumerate(where) if first <= position < stop]


def _pulled(plan: TensorPlan, gradient: mx.array) -> mx.array:
    """Return the gradient by keys as they are before their rope is applied."""
    x = plan.unrotated(gradient, 0)
    if plan.rope is not None and plan.rope.mscale != 1.0:
        # undoing divides by it; the chain rule multiplies
        x = x.at[..., : plan.rope.dims].multiply(plan.rope.mscale**2)
    return x
