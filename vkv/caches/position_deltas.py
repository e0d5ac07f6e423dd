"""Find positions that a model shifts beside its caches: M-RoPE, in vision models (rule L11).

After an image such a model counts positions otherwise than tokens, and keeps the
difference in an attribute of its own. No file records it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

#: Names under which mlx-lm's and mlx-vlm's models keep it.
ATTRIBUTES = ("_rope_deltas", "rope_deltas")


def position_deltas(model: Any) -> dict[str, list[float]]:
    """Return the differences that are not zero, by the path of the attribute in the model."""
    shifted: dict[str, list[float]] = {}
    for path, module in model.named_modules() if hasattr(model, "named_modules") else ():
        for name in ATTRIBUTES:
            values = _numbers(getattr(module, name, None))
            if any(values):
                shifted[f"{path}.{name}".lstrip(".")] = values
    return shifted


def _numbers(value: Any) -> list[float]:
    if isinstance(value, mx.array):
        numbers: Any = value.flatten().tolist()
        return list(numbers)
    return [value] if isinstance(value, int | float) else []
