"""A second decoder of ``kvquant``, from ``spec/v1/codecs/kvquant.md`` alone: NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def decode(
    parts: dict[str, np.ndarray], params: dict[str, Any], shape: tuple[int, ...]
) -> np.ndarray:
    """Parts to values, F32."""
    batch, heads, tokens, dim = shape
    codes = unpacked(parts["codes"], params["bits"], dim)
    levels = parts["levels"].astype(np.float32)
    b, h, t, d = np.ogrid[:batch, :heads, :tokens, :dim]
    match params["table"]:
        case "channel":
            x = levels[b, h, d, codes]
        case "token":
            x = levels[b, h, t, codes]
        case "shared":
            scale = scales(parts["scales"])[..., None]
            offset = parts["offsets"][..., None].astype(np.float32) / np.float32(64)
            x = np.clip(scale * (levels[codes] + offset), -65504, 65504)
    if params["outlier_fraction"] > 0:
        ordered = np.ascontiguousarray(np.moveaxis(x, 2, 0))  # T, B, H, D
        ordered.reshape(-1)[places(parts["gaps"], x.size)] = parts["outliers"]
        x = np.moveaxis(ordered, 0, 2)
    return np.ascontiguousarray(x, np.float32)


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of each row, low bits first."""
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return np.asarray((stream << np.arange(bits)).sum(-1))


def scales(code: np.ndarray) -> np.ndarray:
    code = code.astype(np.float64)
    value = 2 ** (code // 8 - 15) * (1 + code % 8 / 8)
    return np.where(code == 0, 0, value).astype(np.float32)


def places(gaps: np.ndarray, elements: int) -> list[int]:
    """Where the outliers are, in token order."""
    found, at = [], 0
    for gap in gaps.tolist():
        at += gap
        if gap < 255:
            found.append(at)
            at += 1
    assert found.pop() == elements
    return found
