"""State the parts of ``kvquant`` (rule Q2)."""

from __future__ import annotations

from vkv.codecs.bits import words
from vkv.codecs.protocol import Layout


def parts_layout(shape: tuple[int, ...], bits: int, table: str, sparse: bool) -> Layout:
    """Return dtype and shape of each part.

    Args:
        shape: Of the tensor, ``(B, H, T, D)``.
        bits: Bits of a code.
        table: ``"channel"``, ``"token"`` or ``"shared"``.
        sparse: Whether there are outliers.
    """
    batch, heads, tokens, dim = shape
    owners = {"channel": (batch, heads, dim), "token": (batch, heads, tokens), "shared": ()}
    parts: Layout = {
        "codes": ("U32", (batch, heads, tokens, words(dim, bits))),
        "levels": ("F16", (*owners[table], 1 << bits)),
    }
    if table == "shared":
        parts["scales"] = ("U8", (batch, heads, tokens))
        parts["offsets"] = ("I8", (batch, heads, tokens))
    if sparse:
        parts["gaps"] = ("U8", (None,))
        parts["outliers"] = ("F16", (None,))
        if table == "channel":
            parts["bounds"] = ("F16", (batch, heads, dim, 2))
    return parts
