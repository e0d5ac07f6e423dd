"""Convert prompt caches of mlx-lm, and vkv files, to a new vkv file: ``vkv.convert``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import vkv._version
from vkv import identity
from vkv.arrays.cache_file import CacheFile, open_file
from vkv.caches.encoded import EncodedRun
from vkv.caches.kinds.adapter import Snapshot, Value
from vkv.caches.loading.checkpoints import stored_checkpoints
from vkv.caches.loading.decode import decode
from vkv.caches.loading.owner import check_owner
from vkv.caches.saving.basis_file import attached
from vkv.caches.saving.request import CodecSpec, Progress, SaveRequest, codec_pair
from vkv.caches.saving.write import write
from vkv.codecs.protocol import DTYPES
from vkv.errors import ContainerError, MismatchError, NotVkvError, VkvError
from vkv.format import header
from vkv.format.dependencies import SearchPath, resolver_for
from vkv.format.document import open_document
from vkv.format.info import Info
from vkv.format.kinds import KINDS
from vkv.format.layer_rules import check_cache, check_layers
from vkv.format.layers import external_references
from vkv.format.schema import Header, Layer, Tensor
from vkv.format.target import check_target
from vkv.interop import files as mlx_lm_files
from vkv.interop.layers import check_codes
from vkv.sources.urls import check_local, is_url
from vkv.tools.inline import inline as inlined


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    codec: CodecSpec | None = None,
    metadata: Mapping[str, str] | None = None,
    created: str | None = None,
    model: Any = None,
    tokenizer: Any = None,
    tokens: Any = None,
    inline: bool = False,
    search_paths: Iterable[SearchPath] | None = None,
    basis: SearchPath | None = None,
    force: bool = False,
    progress: Progress | None = None,
    durable: bool = True,
) -> Info:
    """Write a prompt cache of mlx-lm, or a vkv file, as a vkv file with ``codec``.

    What ``src`` is, its content tells, not its name. mlx-lm files know neither
    model nor tokens: give them here, or the result cannot be checked. Of a vkv
    file all is kept but the codecs; codes that the cache itself holds (a quantized
    cache) stay as they are, everything else is decoded and encoded again.

    Args:
        src: A ``.vkv`` file (a path or a URL), or one that ``mlx_lm``'s ``save_prompt_cache`` wrote
            (0.2x to 0.32, whichever is installed).
        dst: Where to write, whole or not at all; may be ``src``, which is then replaced.
        codec: As in ``vkv.save``; by default ``"raw"``.
        metadata: Added to that of ``src``, and stronger.
        created: Instead of the time stamp of ``src``.
        model: The model that filled the cache; a vkv file of another one is refused.
        tokenizer: Its tokenizer, likewise.
        tokens: The ids the cache holds, likewise.
        inline: Encode nothing: copy all as it stands, and what ``src`` refers to in other
            files into ``dst``, which then depends on no file. For vkv files; beside it
            ``metadata``, ``created``, ``model`` and ``tokenizer`` may be given.
        search_paths: Where the files are found that ``src`` depends on, as in ``vkv.load``.
        basis: As in ``vkv.save``.
        force: As in ``vkv.save``.
        progress: Called with (bytes done, bytes in all).
        durable: Flush to the disk before returning.

    Returns:
        What was written, as ``vkv.inspect`` tells it.

    Raises:
        ContainerError: ``src`` is neither, or is damaged (C1 to C8, C10).
        CacheError: A cache of an unknown class (L1), or an inconsistent one (L3 to L6).
        MismatchError: ``src`` belongs to another model, tokenizer or prompt (I1).
        VkvError: A vkv file is damaged, ``codec`` is refused, or an argument has no meaning
            beside ``inline``.
        OSError: A file cannot be read or written; what stood at ``dst`` is untouched.
    """
    check_local(dst, "dst")
    if inline:
        _check_inline(codec=codec, tokens=tokens, basis=basis)
        with open_document(src) as source:
            check_target(dst, external_references(source.header))
            check_layers(source.header)
            check_owner(source.header, model, tokenizer)
            resolver = resolver_for(source, search_paths)
            return inlined(
                source, dst, resolver, metadata=metadata, created=created, durable=durable
            )
    request = SaveRequest(codecs=codec_pair("raw" if codec is None else codec), force=force)
    head = Header(
        version=header.VERSION,
        producer=f"vkv {vkv._version.__version__}",
        created=created,
        layers=(),
        tensors={},
        metadata=header.metadata(dict(metadata or {})),
    )
    file = _open(src, search_paths)
    if file is None:
        layers, text = mlx_lm_files.read(src)
        head = header.replace(head, metadata=text | head.metadata)
        head, request = _identified(head, request, len(layers), model, tokenizer)
        snapshots = _drain(layers)
        try:
            with _with_basis(request, head, basis) as asked:
                return write(
                    dst, head, asked, snapshots, tokens,
                    model=model, durable=durable, progress=progress,
                )  # fmt: skip
        except RuntimeError as exc:  # MLX's, of an array that is no longer in the file
            raise ContainerError(f"cannot be read: {exc}", rule="C1", at=os.fspath(src)) from None
    with file:
        check_target(dst, external_references(file.header))
        check_cache(file.header)
        check_layers(file.header)
        check_owner(file.header, model, tokenizer)
        head, request = _carried(head, request, file.header)
        head, request = _identified(head, request, len(file.header.layers), model, tokenizer)
        ids, snapshots = _tokens(file, tokens), _decoded(file)
        with _with_basis(request, head, basis) as asked:
            return write(
                dst, head, asked, snapshots, ids, checkpoints=stored_checkpoints(file),
                model=model, durable=durable, progress=progress,
            )  # fmt: skip


@contextmanager
def _with_basis(
    request: SaveRequest, head: Header, basis: SearchPath | None
) -> Iterator[SaveRequest]:
    """Give the request the tables of a basis file until the block exits."""
    with attached(basis, request.codecs.both(), head.model, request.ropes) as attachment:
        yield replace(request, basis=attachment)


def _check_inline(**arguments: object) -> None:
    """Refuse arguments that ask for something else than a copy.

    Raises:
        VkvError: Names the first of them.
    """
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise VkvError(
            f"inline=True copies the file as it is, so {given[0]}= has no effect; leave one of "
            "them out"
        )


def _open(
    src: str | os.PathLike[str], search_paths: Iterable[SearchPath] | None
) -> CacheFile | None:
    """Open the file; return ``None`` if it is safetensors of another format."""
    try:
        return open_file(src, search_paths=search_paths)
    except NotVkvError as exc:
        if isinstance(src, str) and is_url(src):
            exc.message = "a prompt cache of mlx-lm is read from a local file: download it first"
            raise
        return None


def _carried(head: Header, request: SaveRequest, source: Header) -> tuple[Header, SaveRequest]:
    """Return what stays of a header when a vkv file is encoded again."""
    layer_ropes = source.model.ropes if source.model else tuple(map(_rope, source.layers))
    head = header.replace(
        head,
        created=source.created if head.created is None else head.created,
        model=source.model,
        tokenizer=source.tokenizer,
        metadata=source.metadata | head.metadata,
    )
    return head, replace(request, ropes=source.ropes, layer_ropes=layer_ropes)


def _rope(layer: Layer) -> int | None:
    found = (s.rope for tensor in layer.tensors.values() for s in tensor.segments)
    return next((rope for rope in found if rope is not None), None)


def _identified(
    head: Header, request: SaveRequest, layers: int, model: Any, tokenizer: Any
) -> tuple[Header, SaveRequest]:
    """Add who made the cache, where ``head`` does not say."""
    if model is not None and head.model is None:
        found, ropes = identity.of_model(model)
        if layers != len(found.ropes):
            text = f"{layers} layers in the file, {len(found.ropes)} in the model's cache"
            raise MismatchError([text])
        request = replace(request, ropes=tuple(ropes), layer_ropes=found.ropes)
        head = header.replace(head, model=found)
    if tokenizer is not None and head.tokenizer is None:
        head = header.replace(head, tokenizer=identity.of_tokenizer(tokenizer))
    return head, request


def _tokens(file: CacheFile, given: Any) -> Any:
    """Return the token ids of the file, or those given where it has none."""
    known = file.header.tokens
    if known is None:
        return given
    if given is not None and identity.of_tokens(given) != known.digest:
        raise MismatchError(["the tokens given are not those of the file"])
    return np.frombuffer(file.document.read(known.tensor), "<u4")


def _drain(layers: list[Snapshot]) -> Iterator[Snapshot]:
    """Yield each layer, its codes checked, and let go of it.

    Raises:
        CodecError: Codes that no reader takes (A3).
    """
    count, layers = len(layers), layers[::-1]
    while layers:
        at = f"layers[{count - len(layers)}]"
        layer = layers.pop()
        check_codes(layer, at)
        yield layer


def _decoded(file: CacheFile) -> Iterator[Snapshot]:
    """Yield each layer of a file, decoded when it is asked for."""
    for i, layer in enumerate(file.header.layers):
        yield _snapshot(file, layer, f"layers[{i}]")


def _snapshot(file: CacheFile, layer: Layer, at: str) -> Snapshot:
    value = _codes if KINDS[layer.kind].content == "codes" else _array
    return Snapshot(
        layer.kind,
        layer.scalars,
        {name: value(file, layer, name, at) for name in layer.tensors},
        [_snapshot(file, c, f"{at}.children[{i}]") for i, c in enumerate(layer.children)],
    )


def _array(file: CacheFile, layer: Layer, name: str, at: str) -> Value:
    tensor = layer.tensors[name]
    x = decode(file, layer, name, at)
    return Value(tensor.shape, DTYPES[tensor.dtype], x, tokens=KINDS[layer.kind].content == "rows")


def _codes(file: CacheFile, layer: Layer, name: str, at: str) -> Value:
    tensor: Tensor = layer.tensors[name]
    try:
        codec, parts = file.parts(tensor.segments[0], tensor.shape)
    except VkvError as exc:
        raise exc.within(f"{at}.{name}") from None
    run = EncodedRun(codec, parts, tensor.shape[-2], codec.roles)
    return Value(tensor.shape, DTYPES[tensor.dtype], encoded=(run,))
