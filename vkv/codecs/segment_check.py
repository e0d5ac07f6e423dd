"""Check segments against their codec's layout, from the header alone (K1 to K5)."""

from __future__ import annotations

from vkv.codecs import registry
from vkv.codecs.protocol import Codec, check_forms
from vkv.errors import CodecError
from vkv.format.layers import stored_layers
from vkv.format.schema import Header, Segment, Tensor


def fit(head: Header, segment: Segment, shape: tuple[int, ...]) -> Codec:
    """Return the codec of a segment that covers ``shape``, before anything of it is read.

    Args:
        head: Of the file.
        segment: One of its segments.
        shape: Covered.

    Raises:
        UnknownCodecError: This build lacks the codec (K1).
        CodecError: Parameters (K2), forms (K3) or roles (K5) are refused.
    """
    codec = registry.resolve(segment.codec, segment.version, segment.params)
    stored = {part: head.tensors[name] for part, name in segment.parts.items()}
    check_forms(codec.layout(shape), {part: (t.dtype, t.shape) for part, t in stored.items()})
    for part, tensor in stored.items():
        roles = (codec.roles[part], *codec.traits.other_roles)
        if tensor.role not in roles:
            message = f"role {tensor.role}, expected {' or '.join(roles)}"
            raise CodecError(message, rule="K5", at=part)
    return codec


def check_rereads(head: Header) -> None:
    """Refuse a file whose expensive parts are read over and over.

    Raises:
        CodecError: More of them is read again than the file has bytes (T23).
    """
    seen: set[object] = set()
    again = 0
    for _, layer in stored_layers(head):
        for tensor in layer.tensors.values():
            for name in _reads(tensor):
                stored = head.tensors[name]
                key = (stored.file, stored.digest)
                again += stored.nbytes if key in seen else 0
                seen.add(key)
    own = sum(stored.nbytes for stored in head.tensors.values() if stored.file is None)
    if again > own:
        raise CodecError(
            f"{again} bytes of bases are read again, expected at most the {own} of the file",
            rule="T23",
            at="layers",
        )


def _reads(tensor: Tensor) -> list[str]:
    """Return the expensive parts that a tensor reads; one after the same one is not read again."""
    expensive: list[str] = []
    for segment in tensor.segments:
        codec = registry.CODECS.get((segment.codec, segment.version))
        part = None if codec is None else codec.traits.expensive_part
        name = None if part is None else segment.parts.get(part)
        if name is not None and expensive[-1:] != [name]:
            expensive.append(name)
    return expensive
