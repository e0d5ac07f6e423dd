"""List the codecs, and parse the strings that name them.

A codec string is ``name[:key=value,...]``, the same in Python and on the command
line: ``raw``, ``affine:bits=4,group=32``.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkv.codecs.affine import Affine
from vkv.codecs.kvquant.codec import KvQuant
from vkv.codecs.lossless.codec import Lossless
from vkv.codecs.nsnquant.codec import NSNQuant
from vkv.codecs.options import build, parse_options
from vkv.codecs.protocol import Codec, Layout, Options, Parts
from vkv.codecs.raw import Raw
from vkv.codecs.tc.codec import Tc
from vkv.errors import CodecError, UnknownCodecError
from vkv.format.schema import Segment

__all__ = ["CODECS", "Codec", "CodecRequest", "Layout", "Parts", "parse", "resolve"]

CODECS: dict[tuple[str, int], type[Codec]] = {
    (c.id, c.version): c for c in (Affine, KvQuant, Lossless, NSNQuant, Raw, Tc)
}


def newest() -> dict[str, int]:
    """Return the codec ids and the newest version of each."""
    return dict(sorted(CODECS))


def resolve(codec: str, version: int, params: Options) -> Codec:
    """Build the codec that a header names.

    Raises:
        UnknownCodecError: Not in the table (K1).
        CodecError: Its parameters are refused (K2 and the codec's own).
    """
    if (codec, version) not in CODECS:
        raise UnknownCodecError(codec, version, known=newest())
    return build(CODECS[codec, version], params)


def is_lossless(segment: Segment) -> bool:
    """Return whether a stored segment holds its values bit for bit, as far as this build knows."""
    codec = CODECS.get((segment.codec, segment.version))
    return codec is not None and codec.traits.lossless


@dataclass(frozen=True, slots=True)
class CodecRequest:
    """A codec that was asked for, before it meets a tensor."""

    text: str
    codec: type[Codec]
    options: Options

    def configure(self, tensor: str, dtype: str) -> Codec:
        """Build the codec for ``"keys"`` or ``"values"`` of a safetensors dtype."""
        return self.codec.configure(self.options, tensor, dtype)


def parse(text: str) -> CodecRequest:
    """Parse a codec string: the codec it names, in its newest version, and its options.

    Args:
        text: ``name[:key=value,...]``.

    Raises:
        UnknownCodecError: No such codec (K1).
        CodecError: Malformed, or an option is refused (K2 and the codec's own).
    """
    name, _, rest = text.strip().partition(":")
    if name not in newest():
        raise UnknownCodecError(name, 1, known=newest())
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or key in options:
            raise CodecError(
                f"{item!r} in {text!r}: expected key=value, each key once", rule="K2", at=name
            )
        options[key] = value
    codec = CODECS[name, newest()[name]]
    request = CodecRequest(text.strip(), codec, parse_options(codec, options))
    request.configure("keys", "F16")  # refuse bad values now, not at the first layer
    return request
