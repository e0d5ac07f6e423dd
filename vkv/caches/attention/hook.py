"""Let mlx-lm's models attend to codes.

mlx-lm's models give what ``cache.update_and_fetch`` returns to
``mlx_lm.models.base.scaled_dot_product_attention``. ``install`` puts a function in its place
that takes ``Pending`` rows, too, and leaves all else to mlx-lm.

Some models change keys on the way, or attend by themselves, or use attention sinks. So the
model gets arrays first, which MLX decodes when they are used. Arrays that arrive at attention
as they were are left alone, and the codes behind them used. Code that was seen to pass arrays
on like this gets ``Pending`` rows from then on, which cost less to make.
"""

from __future__ import annotations

import inspect
import sys
import threading
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx

from vkv.caches.attention.attend import Decode, Layer
from vkv.caches.attention.past import Past
from vkv.errors import CacheError

__all__ = ["Attention", "Pending", "Route", "check", "install"]

#: Arguments of mlx-lm's function, 0.31 to 0.32.
ARGUMENTS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
_NAME = "scaled_dot_product_attention"
_lock = threading.Lock()


class Route:
    """Hold what is known of the model that uses the caches of one prompt.

    Attributes:
        note: Why rows are decoded for attention, or ``None``.
    """

    def __init__(self) -> None:
        self.note: str | None = None

    def __reduce__(self) -> tuple[type[Route], tuple[()]]:
        """Copies and pickles begin anew."""
        return Route, ()


class Pending:
    """Stands for the keys, and for the values, of a layer until attention.

    Attributes:
        keys, values: The rows.
        decode: Returns both as arrays.
        layer: Attends to them.
    """

    __slots__ = ("decode", "keys", "layer", "values")

    def __init__(
        self,
        layer: Layer,
        keys: Past,
        values: Past,
        decode: Decode,
    ):
        self.layer, self.keys, self.values, self.decode = layer, keys, values, decode


class Attention:
    """Lead attention to the codes of one packed cache.

    Args:
        route: Shared by the caches of one prompt.
    """

    def __init__(self, route: Route | None = None):
        self.route = route or Route()
        self._layer = Layer()
        self._offered: _Offer | None = None
        # Code that called ``update_and_fetch`` of this cache and then passed arrays on as they
        # were, with whether it was for one token. Layers of one model may attend differently.
        self._seen = set[tuple[CodeType, bool]]()

    def __reduce__(self) -> tuple[type[Attention], tuple[Route]]:
        """Copies and pickles keep no kernels."""
        return Attention, (self.route,)

    def offer(
        self, caller: CodeType, length: int, keys: Past, values: Past, decode: Decode
    ) -> tuple[Any, Any]:
        """Return what ``caller`` passes on to attention: pending rows, or arrays.

        Args:
            caller: The code that called ``update_and_fetch``.
            length: New tokens.
            keys, values: All tokens.
            decode: Returns both as arrays that are not computed yet.
        """
        if self._offered is not None:
            self._note("the model attends by itself")
        self._offered = None
        if not self._layer.takes(keys, values, length):
            return decode()
        rows, way = Pending(self._layer, keys, values, decode), (caller, length == 1)
        if way in self._seen:
            return rows, rows
        arrays = decode()
        self._offered = _Offer(ref(arrays[0]), ref(arrays[1]), rows, way)
        return arrays

    def reached(self, keys: mx.array, values: mx.array, sinks: object) -> Pending | None:
        """Learn what arrived at attention; return the rows that the arrays stand for."""
        offered, self._offered = self._offered, None
        if offered is None:
            return None
        if sinks is not None:
            self._note("the model uses attention sinks")
        elif keys is not offered.keys() or values is not offered.values():
            self._note("the model changes them on their way")
        else:
            self._seen.add(offered.way)
            return offered.rows
        return None

    def _note(self, reason: str) -> None:
        self.route.note = f"keys and values are decoded for attention: {reason}"


class _Offer(NamedTuple):
    """Arrays that a model was given, not kept from being freed, and what they stand for."""

    keys: ref[mx.array]
    values: ref[mx.array]
    rows: Pending
    way: tuple[CodeType, bool]


def install() -> None:
    """Replace mlx-lm's function, once, in its module and in the models that hold it.

    Raises:
        CacheError: It is not the function that this module knows (L2).
    """
    from mlx_lm.models import base

    with _lock:
        known = getattr(base, _NAME)
        if not hasattr(known, "plain"):
            check(known)
            known = _replacement(known)
            setattr(base, _NAME, known)
        for name, module in list(sys.modules.items()):
            if name.startswith("mlx_lm.") and getattr(module, _NAME, None) is known.plain:
                setattr(module, _NAME, known)


def check(known: Any) -> None:
    """Compare mlx-lm's function with what this module replaces.

    Raises:
        CacheError: Its arguments are others (L2).
    """
    found = tuple(inspect.signature(known).parameters)
    if found != ARGUMENTS:
        text = f"mlx_lm.models.base.{_NAME} takes {found}, expected {ARGUMENTS}"
        raise CacheError(f"{text}; this release of mlx-lm is not known", rule="L2")


def _replacement(plain: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> Any:
        if type(keys) is Pending:
            rows: Pending | None = keys
        else:
            attention = getattr(cache, "attention", None)
            rows = attention.reached(keys, values, sinks) if type(attention) is Attention else None
        if rows is None:
            return plain(queries, keys, values, cache, scale, mask, sinks)
        if sinks is None and (mask is None or isinstance(mask, str)):
            causal = mask is not None
            return rows.layer.attend(queries, rows.keys, rows.values, scale, causal, rows.decode)
        return plain(queries, *rows.decode(), None, scale, mask, sinks)

    scaled_dot_product_attention.plain = plain  # type: ignore[attr-defined]
    return scaled_dot_product_attention
