"""Define the fields of the msgpack header, as msgspec Structs. No codecs, no MLX.

The rules on them are H1 to H11 of ``spec/v1/format.md``.
"""

from __future__ import annotations

from math import prod
from typing import Annotated

import msgspec

from vkv.format.dtypes import ITEMSIZE
from vkv.format.limits import FEW, MANY, MAX_FREQS, MAX_SIZE, MAX_TOKENS

#: What a stored tensor's bytes are spent on; the rows of the byte account.
ROLES = ("payload", "table", "metadata", "outlier", "sink", "residual", "tokens")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
#: MLX counts sizes in 32 bits.
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
Scalar = int | float | str | bool
Many = msgspec.Meta(max_length=MANY)
Few = msgspec.Meta(max_length=FEW)


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe one stored tensor: its role in the account, form and BLAKE3.

    ``file`` is the id of another vkv file that holds it; without, it is in the container.
    """

    role: Name
    dtype: Name
    shape: Shape
    digest: Digest
    file: Digest | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


class Rope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a rotary embedding as ``mx.fast.rope`` takes it.

    Either ``base`` or ``freqs`` (float32 values, ``dims / 2`` of them, as MLX's
    ``freqs`` argument) is given. ``mscale`` multiplies the rotated dims first
    (YaRN, SuScaled).
    """

    dims: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    traditional: bool = False
    base: float | None = None
    freqs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_FREQS)] | None = None
    scale: float = 1.0
    mscale: float = 1.0


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a run of tokens written by one codec.

    ``params`` belongs to the codec, not to the header. ``parts`` maps the
    codec's part names to names of stored tensors; several segments may share one
    (a codebook). ``rope`` is an index into ``Header.ropes`` when the keys were
    rotated back before they were encoded.
    """

    codec: Name
    version: Annotated[int, msgspec.Meta(ge=1)]
    params: Annotated[dict[str, Scalar], Few] = {}
    tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    parts: Annotated[dict[Name, Name], Few]
    rope: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def is_raw(self) -> bool:
        """Tell whether its one part is the values themselves (codec ``raw``)."""
        return self.codec == "raw"


class Tensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe one logical tensor of a layer: its segments in order, joined along axis -2.

    ``note`` says why a codec that was asked for was not used.
    """

    dtype: Name
    shape: Shape
    segments: Annotated[tuple[Segment, ...], Many]
    note: str | None = None


class Layer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe one live cache: its kind, its scalars, its tensors or its children."""

    kind: Name
    scalars: Annotated[dict[str, int], Few] = {}
    tensors: dict[Name, Tensor] = {}
    children: Annotated[tuple[Layer, ...], Many] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what caches that let go of tokens held after the first ``tokens`` tokens.

    ``layers`` maps the path of such a cache among the layers (``"3"``; ``"3.1"`` for a
    child of a list) to what it held. Caches that can be cut are not in it. ``message``
    says that it stands at the end of a message.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    layers: Annotated[dict[Name, Layer], Many]
    message: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identify the model (``vkv.identity``). ``ropes`` holds, per cache, an index or nil."""

    id: Digest
    type: str
    config: str
    parameters: Count
    layers: Annotated[tuple[Digest, ...], Many]
    rest: Digest
    ropes: Annotated[tuple[int | None, ...], Many] = ()


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identify the tokenizer; the chat template stands apart."""

    id: Digest
    vocab_size: Count
    template: Digest | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Count the token ids, and hold the BLAKE3 of their little-endian u32 bytes."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    digest: Digest
    tensor: Name


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a whole ``.vkv`` file.

    ``tables`` offers stored tables to other files: a name such as
    ``layers.3.keys.basis`` to the name of a stored tensor. A file with tables and no
    layers holds no cache.

    ``pad`` is zeros that bring the header to a multiple of 64 bytes, so that the
    first tensor after it is aligned.
    """

    version: str
    producer: str
    needs: Annotated[tuple[str, ...], Few] = ()
    created: str | None = None
    model: Model | None = None
    tokenizer: Tokenizer | None = None
    tokens: Tokens | None = None
    ropes: Annotated[tuple[Rope, ...], Many] = ()
    layers: Annotated[tuple[Layer, ...], Many]
    checkpoints: Annotated[tuple[Checkpoint, ...], Few] = ()
    tensors: dict[Name, Stored]
    tables: Annotated[dict[Name, Name], Many] = {}
    metadata: Annotated[dict[str, str], Many] = {}
    pad: bytes = b""
